"""A server that looks like vLLM 0.32 from outside: its flags, its adapter endpoints with its
messages, its way of ending. The embedded engine samples.

``python -m tests.contract.double -m vllm.entrypoints.openai.api_server --model …``
"""

import argparse
import os
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors import safe_open

from babylon.serving.engine_protocol import Handler

ROOT = Path(__file__).parents[2]
IN_FLIGHT: web.AppKey[list[object]] = web.AppKey("in_flight", list)


def install(directory: Path, build: str = "vllm 0.32.0") -> Path:
    """A program that takes the arguments of a python with this vLLM; returns its path."""
    program = directory / "python-with-vllm"
    python, root = shlex.quote(sys.executable), shlex.quote(str(ROOT))
    program.write_text(
        f"""#!/bin/sh
        if [ "$1" = -c ]; then echo {shlex.quote(build)}; exit; fi
        PYTHONPATH={root} exec {python} -m tests.contract.double "$@"
        """
    )
    program.chmod(0o755)
    return program


def make_double(model: str, name: str) -> web.Application:
    # Imported after the weights were looked at, because torch takes seconds to import.
    from babylon.serving.engine.engine_process import POLICIES, make_app

    app = make_app()
    app[IN_FLIGHT] = []
    adapters: dict[str, str] = {}

    async def load_base(app: web.Application) -> AsyncIterator[None]:
        await app[POLICIES].load(name, model, 0)
        yield

    async def models(request: web.Request) -> web.Response:
        base = {"id": name, "object": "model", "root": model, "parent": None}
        cards = [{"id": i, "root": path, "parent": name} for i, path in adapters.items()]
        return web.json_response({"object": "list", "data": [base, *cards]})

    async def load(request: web.Request) -> web.Response:
        body = await request.json()
        given, path = body["lora_name"], body["lora_path"]
        if body.get("load_inplace"):
            raise AssertionError("an adapter must never be loaded in place")
        if given == name:
            return _refusal(400, f"The lora adapter '{given}' conflicts with a served base model.")
        if given in adapters:
            return _refusal(400, f"The lora adapter '{given}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").exists():
            return _refusal(404, f"Loading lora {given} failed: No adapter found for {path}")
        await request.app[POLICIES].load(given, path, 0)
        adapters[given] = path
        return web.Response(text=f"Success: LoRA adapter '{given}' added successfully.")

    async def unload(request: web.Request) -> web.Response:
        given = (await request.json())["lora_name"]
        if given not in adapters:
            return _refusal(404, f"The lora adapter '{given}' cannot be found.")
        request.app[POLICIES].unload(given)
        del adapters[given]
        return web.Response(text=f"Success: LoRA adapter '{given}' removed successfully.")

    async def metrics(request: web.Request) -> web.Response:
        running = len(request.app[IN_FLIGHT])
        labels = f'{{engine="0",model_name="{name}"}}'
        text = f"vllm:num_requests_running{labels} {running}.0\n"
        return web.Response(text=f"{text}vllm:num_requests_waiting{labels} 0.0\n")

    vllm = {"/v1/models": models, "/metrics": metrics}
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
        vllm |= {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}

    @web.middleware
    async def like_vllm(request: web.Request, handler: Handler) -> web.StreamResponse:
        key, sent = os.environ.get("VLLM_API_KEY"), request.headers.get("Authorization")
        if key and request.path not in ("/health", "/metrics") and sent != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if known := vllm.get(request.path):
            return await known(request)
        known_paths = ("/health", "/tokenize", "/v1/chat/completions", "/v1/completions")
        if request.path not in known_paths:
            return web.json_response({"detail": "Not Found"}, status=404)
        request.app[IN_FLIGHT].append(request)
        try:
            return await handler(request)
        finally:
            request.app[IN_FLIGHT].remove(request)

    app.middlewares.append(like_vllm)
    app.cleanup_ctx.append(load_base)
    return app


def _refusal(status: int, message: str) -> web.Response:
    error: dict[str, Any] = {"message": message, "type": "InvalidUserInput", "code": status}
    return web.json_response({"error": error}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", required=True, choices=["vllm.entrypoints.openai.api_server"])
    for name in ("--model", "--served-model-name", "--host", "--allowed-media-domains"):
        parser.add_argument(name, required=True)
    parser.add_argument("--middleware", required=True, choices=["babylon_guard.NeedsKey"])
    parser.add_argument("--logprobs-mode", required=True, choices=["processed_logprobs"])
    parser.add_argument("--generation-config", required=True, choices=["vllm"])
    parser.add_argument("--tool-call-parser", required=True)
    flags = ("--enable-lora", "--disable-uvicorn-access-log", "--enable-auto-tool-choice")
    for name in (*flags, "--enable-mixed-moe-lora-format"):
        parser.add_argument(name, required=True, action="store_true")
    parser.add_argument("--no-enable-chunked-prefill", action="store_true")  # of CPU builds
    for name in ("--port", "--max-loras", "--max-cpu-loras", "--max-lora-rank"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    with safe_open(Path(options.model) / "model.safetensors", "np"):
        pass  # damaged weights end it at once
    web.run_app(
        make_double(options.model, options.served_model_name),
        host=options.host,
        port=options.port,
        handler_cancellation=True,
        shutdown_timeout=0.1,
        access_log=None,
    )


if __name__ == "__main__":
    main()

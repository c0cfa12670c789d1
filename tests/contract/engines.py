"""Engines under test, and a client for them."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import aiohttp
from pydantic import SecretStr

from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.serving.gateway.engine_client import EngineClient
from babylon.serving.gateway.engine_connections import EngineConnections, EngineResponse
from babylon.serving.gateway.route_table import Target
from tests.contract.checkpoints import CONTEXT
from tests.ports import free_port

# `make test-vllm` names the python of a vLLM that runs on this machine's CPU.
VLLM_PYTHON = os.environ.get("CONTRACT_VLLM_PYTHON")
ENGINES = ["vllm"] if VLLM_PYTHON else ["embedded", "vllm-double"]
PATIENCE_S = 600
SECRET = "contract"  # with which an engine loads and unloads
_REAL_ARGS = f"--dtype float32 --enforce-eager --max-model-len {CONTEXT}"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Answer:
    """An answer's pieces, whether it was streamed or not."""

    status: int
    bodies: list[dict[str, Any]]
    done: bool = True

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for body in self.bodies for choice in body.get("choices", [])]

    @property
    def text(self) -> str:
        return "".join(_text(choice) for choice in self.choices)

    @property
    def token_ids(self) -> list[int]:
        return [i for choice in self.choices for i in choice.get("token_ids") or []]

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens: beside the choices of a chat, in a completion's first choice."""
        given = [part.get("prompt_token_ids") for part in (*self.bodies, *self.choices)]
        (ids,) = [ids for ids in given if ids]
        return list(ids)

    @property
    def logprobs(self) -> list[float]:
        found: list[float] = []
        for choice in self.choices:
            logprobs = choice.get("logprobs") or {}
            found += [token["logprob"] for token in logprobs.get("content") or []]
            found += logprobs.get("token_logprobs") or []
        return found

    @property
    def finish_reason(self) -> str:
        (reason,) = [c["finish_reason"] for c in self.choices if c["finish_reason"]]
        return str(reason)

    @property
    def usage(self) -> dict[str, Any]:
        (usage,) = [body["usage"] for body in self.bodies if body.get("usage")]
        return dict(usage)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.bodies[0]["error"])


@dataclass
class EngineUnderTest:
    """Client of one engine: loads and unloads policies, and makes calls."""

    url: str
    http: aiohttp.ClientSession
    client: EngineClient

    async def load(self, name: str, path: Path) -> str:
        await self.client.load(Target(name, 1, str(path)))
        return name

    async def put(self, name: str, path: Path, version: int = 1) -> tuple[int, dict[str, Any]]:
        body = {"path": str(path), "version": version}
        async with self.http.put(f"{self.url}/policies/{name}", json=body) as response:
            return response.status, await response.json()

    async def cards(self) -> dict[str, dict[str, Any]]:
        async with self.http.get(f"{self.url}/v1/models") as response:
            return {card["id"]: card for card in (await response.json())["data"]}

    async def health(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/health") as response:
            health: dict[str, Any] = await response.json()
            return health

    async def send(self, name: str, body: bytes, path: str = "/v1/chat/completions") -> Answer:
        """A request as the gateway sends it."""
        async with await self.client.call(path, body, name) as response:
            text = (await response.read()).decode()
            if text.startswith("{"):
                return Answer(response.status, [json.loads(text)])
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            bodies = [json.loads(event) for event in events if event != "[DONE]"]
            return Answer(response.status, bodies, done=events[-1] == "[DONE]")

    async def chat(self, name: str, **fields: Any) -> Answer:
        return await self.send(name, json.dumps(asked(name, messages=HELLO, **fields)).encode())

    async def complete(self, name: str, prompt: str | list[int], **fields: Any) -> Answer:
        body = asked(name, **{"prompt": prompt, "logprobs": 0, **fields})
        return await self.send(name, json.dumps(body).encode(), "/v1/completions")

    async def begin(self, name: str, **fields: Any) -> EngineResponse:
        """A streamed chat whose first token has come."""
        body = asked(name, messages=HELLO, stream=True, **fields)
        path = "/v1/chat/completions"
        response = await self.client.call(path, json.dumps(body).encode(), name)
        while response.begun.count(b"\n\n") < 2:  # the role, and the first token
            response.begun += await response.readany()
        return response


def asked(name: str, **fields: Any) -> dict[str, Any]:
    """A request's fields as the gateway sends them, with explicit sampling."""
    added = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    return {
        "model": name,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 24,
        "logprobs": True,
        "return_token_ids": True,
        **added,
        **fields,
    }


def host_settings(
    home: Path, double: Path, *, database_url: SecretStr | None = None, **serving: str
) -> Settings:
    """Settings of a host of vLLM servers, doubles or real ones."""
    return load_settings(
        home=home,
        database={"url": database_url},
        serving={
            "engine": "vllm",
            "engine_port": free_port(),
            "vllm_python": VLLM_PYTHON or str(double),
            "vllm_args": _REAL_ARGS if VLLM_PYTHON else "",
            **serving,
        },
    )


@contextmanager
def running(command: list[str], url: str, environment: dict[str, str]) -> Iterator[int]:
    """A process that answers on ``/health``; yields its pid."""
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < deadline, command
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def running_host(settings: Settings) -> Iterator[str]:
    """Yields its URL."""
    url = f"http://127.0.0.1:{settings.serving.engine_port}"
    (settings.home.root / "engine.key").write_text(SECRET)
    command = [sys.executable, "-m", "babylon.serving.vllm.vllm_host"]
    with running(command, url, settings.environment()):
        yield url


@contextmanager
def running_embedded() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "babylon.serving.engine.engine_process", f"--port={port}"]
    with running(command, f"http://127.0.0.1:{port}", {}):
        yield f"http://127.0.0.1:{port}"


async def open_engine(url: str) -> AsyncIterator[EngineUnderTest]:
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
        headers={"Authorization": f"Bearer {SECRET}"},
    ) as http:
        with closing(EngineConnections()) as connections:
            engine = EngineUnderTest(url, http, EngineClient(connections, url, SECRET))
            await engine.client.policies()  # and where they answer
            yield engine


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except (URLError, ConnectionError, TimeoutError):
        return False


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return str(message.get("content") or choice.get("text") or "")

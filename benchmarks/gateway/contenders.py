"""The contenders between clients and engine: none, our gateway, and LiteLLM's proxy."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.store import Store, open_store
from babylon.store.policies import ensure_base
from benchmarks.gateway.load import Target

START_S = 120.0
OURS, LITELLM, RELAY = "ours", "LiteLLM", "relay"
_RECORDER = Path(__file__).with_name("litellm_recorder.py")
_LITELLM = """
model_list:
  - model_name: babylon
    litellm_params: {{model: openai/babylon, api_base: "{upstream}/v1", api_key: none{asked}}}
general_settings: {{master_key: sk-benchmark}}
litellm_settings: {{telemetry: false, drop_params: false{callbacks}}}
"""


@contextmanager
def upstream(port: int, directory: Path) -> Iterator[Target]:
    """Run the canned engine, which clients also ask directly."""
    command = ["-m", "benchmarks.gateway.upstream", f"--port={port}"]
    with _process([sys.executable, *command], directory / "upstream.log", {}) as pid:
        yield Target("direct", f"http://127.0.0.1:{port}", "none", pid)


@contextmanager
def relay(port: int, engine_port: int, directory: Path) -> Iterator[Target]:
    """Run a relay that does nothing but copy bytes."""
    command = [f"--port={port}", f"--engine-port={engine_port}"]
    module = [sys.executable, "-m", "benchmarks.gateway.relay"]
    with _process([*module, *command], directory / "relay.log", {}) as pid:
        yield Target(RELAY, f"http://127.0.0.1:{port}", "none", pid)


@asynccontextmanager
async def ours(port: int, engine_port: int, directory: Path) -> AsyncIterator[tuple[Target, Store]]:
    """Run the gateway as ``babylon serve`` starts it, with its own embedded Postgres.

    It checks keys and records every call without loss.
    """
    settings: Settings = load_settings(
        home=directory / "home",
        database={"url": None},
        serving={"endpoint": f"http://localhost:{port}", "engine_port": engine_port},
    )
    command = [sys.executable, "-m", "babylon.serving.gateway.gateway_process"]
    async with open_store(settings) as store:
        await ensure_base(store, uri="/canned", base_model="canned")
        with _process(command, directory / "gateway.log", settings.environment()) as pid:
            url = f"http://127.0.0.1:{port}"
            await until_ready(f"{url}/health", pid)
            yield Target(OURS, url, str(local_key(settings.home.root)), pid), store


@asynccontextmanager
async def litellm(
    executable: Path, port: int, engine_port: int, directory: Path, *, recording: bool
) -> AsyncIterator[Target]:
    """Run LiteLLM's proxy with one worker, one key and no database.

    It does the minimum, or with ``recording`` asks the engine for logprobs and token ids and writes
    each call to the disk (``litellm_recorder``).
    """
    home = directory / ("litellm-recording" if recording else "litellm")
    home.mkdir()
    config = home / "litellm.yaml"
    config.write_text(
        _LITELLM.format(
            upstream=f"http://127.0.0.1:{engine_port}",
            asked=", logprobs: true, extra_body: {return_token_ids: true}" if recording else "",
            callbacks=f", callbacks: {_RECORDER.stem}.recorder" if recording else "",
        )
    )
    shutil.copy(_RECORDER, home)
    command = [
        str(executable.absolute()),
        f"--config={config}",
        f"--port={port}",
        "--host=127.0.0.1",
    ]
    silent = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with _process(command, home / "log", silent, directory=home) as pid:
        url = f"http://127.0.0.1:{port}"
        await until_ready(f"{url}/health/liveliness", pid)
        yield Target(f"{LITELLM}, recording" if recording else LITELLM, url, "sk-benchmark", pid)


async def until_ready(url: str, pid: int) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: The server does not answer in time.
    """
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError(f"process {pid} does not answer {url}: see the logs beside its home")


@contextmanager
def _process(
    command: list[str], log: Path, environment: dict[str, str], directory: Path | None = None
) -> Iterator[int]:
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield child.pid
    finally:
        child.terminate()
        child.wait(timeout=30)

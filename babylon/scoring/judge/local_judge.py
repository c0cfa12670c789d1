"""A local checkpoint as judge. The project's engine serves it while the window is judged."""

import asyncio
import hashlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from babylon.core.errors import ServingError
from babylon.core.processes import Service, supervised

MODEL = "judge"
TEMPERATURE = 0.7
_READY_S, _POLL_S = 180.0, 0.1
_LOAD = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJudge:
    """A served checkpoint: its URL, the name of its judgments, and its context."""

    base_url: str
    name: str
    context_tokens: int


@asynccontextmanager
async def local_judge(path: Path, log_file: Path) -> AsyncIterator[LocalJudge]:
    """Serve a checkpoint directory on a free port, and write the engine's output to ``log_file``.

    Raises:
        ServingError: the engine does not start, or the checkpoint does not load.
    """
    port = _free_port()
    service = Service(
        name="judge",
        command=[sys.executable, "-m", "babylon.serving.engine.engine_process", f"--port={port}"],
        log=log_file,
    )
    url = f"http://127.0.0.1:{port}"
    async with supervised(service) as engine, aiohttp.ClientSession() as session:
        for _ in range(round(_READY_S / _POLL_S)):
            if failure := engine.failure():
                raise ServingError(failure)
            if await _answers(session, url):
                break
            await asyncio.sleep(_POLL_S)
        else:
            raise ServingError(f"the judge's engine is not ready after {_READY_S:.0f} s")
        context = await _load(session, url, path)
        yield LocalJudge(
            base_url=f"{url}/v1", name=f"{path.name}@{_fingerprint(path)}", context_tokens=context
        )


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.ok
    except aiohttp.ClientConnectionError:
        return False


async def _load(session: aiohttp.ClientSession, url: str, path: Path) -> int:
    """Load the checkpoint and return its context in tokens."""
    body = msgspec.json.encode({"path": str(path.absolute()), "version": 0})
    async with session.put(f"{url}/policies/{MODEL}", data=body, timeout=_LOAD) as response:
        answer = msgspec.json.decode(await response.read())
    if response.status >= 400:
        raise ServingError(
            f"JUDGE_MODEL_PATH={str(path)!r} does not load: {answer['error']['message']}"
        )
    return int(answer["max_model_len"])


def _fingerprint(path: Path) -> str:
    """Return a hash of the files' names, sizes and times, because other files are another judge."""
    stats = [(file.name, file.stat()) for file in sorted(path.iterdir()) if file.is_file()]
    seen = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:12]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

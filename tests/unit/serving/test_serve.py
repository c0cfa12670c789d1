"""Starting engine and gateway: how long it may take, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from babylon.core.errors import ConfigError, ServingError
from babylon.core.home import Home
from babylon.core.settings import ServingSettings
from babylon.serving import serve


async def test_the_limit_of_a_start_is_seconds_however_slow_the_answers_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]

    async def slow(*_: object) -> str:
        now[0] += 2.0
        return "does not answer"

    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now[0]), raising=False)
    monkeypatch.setattr(serve, "READY_S", {"remote": 4.0})
    monkeypatch.setattr(serve, "_POLL_S", 0.01)
    monkeypatch.setattr(serve, "_health", slow)
    with pytest.raises(ServingError, match="not ready after 4 s"):
        await serve._wait_until_ready(ServingSettings(engine="remote"), Home(tmp_path), [], [1])
    assert now == [4.0]


async def test_vllm_for_other_machines_is_refused_because_it_would_listen_on_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def started(*_: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(serve, "engine_service", started)
    given = ServingSettings(engine="vllm", engine_listen="http://0.0.0.0:8001")
    with pytest.raises(ConfigError, match=r"ENGINE_LISTEN=http://0\.0\.0\.0:8001: .* loopback"):
        await serve.serve_engine(given, Home(tmp_path), {})

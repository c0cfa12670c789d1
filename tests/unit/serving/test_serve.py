"""Starting engine and gateway: how long it may take, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from babylon.core.errors import ServingError
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

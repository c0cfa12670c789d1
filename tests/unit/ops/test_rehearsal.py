from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.ops import rehearsal
from babylon.ops.demo import GAMES


async def test_a_gateway_that_does_not_answer_ends_a_rehearsal_with_its_own_error(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command prints one line for it, and a traceback for any other kind of error."""

    @asynccontextmanager
    async def no_store(settings: Settings) -> AsyncIterator[None]:
        yield None

    async def made(*anything: object, **more: object) -> Path:
        return tmp_path

    async def silent(*anything: object) -> None:
        raise ServingError("agent-0 got no answer")

    monkeypatch.setattr(rehearsal, "resolve_base_in_a_thread", made)
    monkeypatch.setattr(rehearsal, "up", made)
    monkeypatch.setattr(rehearsal, "open_store", no_store)
    monkeypatch.setattr(rehearsal, "run_fleet", silent)
    with pytest.raises(ServingError, match="agent-0 got no answer"):
        await rehearsal.run_rehearsal(
            settings,
            tmp_path,
            GAMES["starter"],
            windows=1,
            shared=False,
            say=lambda line: None,
            step=lambda name, done, total: None,
        )

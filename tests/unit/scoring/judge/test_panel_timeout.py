"""A judge that hangs or dies costs itself, and not the window."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from babylon.core.errors import ScoringError, ServingError
from babylon.core.home import Home
from babylon.core.settings import JudgeSettings
from babylon.scoring.judge import judge_scorers as module
from babylon.scoring.judge.judge_client import _load
from babylon.scoring.judge.judgment import GroundTruth
from tests.judged import config


def work_in(home: Path) -> module._Work:
    context: Any = SimpleNamespace(
        store=None, window_id="w", settings=SimpleNamespace(home=Home(home)), metrics={}
    )
    return module._Work(
        context=context, judged=(), truth=GroundTruth(), config=config(), cheaper=False
    )


async def test_a_judge_that_hangs_fails_by_itself_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def hangs(*_: object, **__: object) -> AsyncIterator[None]:
        await asyncio.sleep(600)
        yield

    monkeypatch.setattr(module, "open_judge", hangs)
    work = work_in(tmp_path)
    members = [JudgeSettings(model="slow", timeout_s=0.05)] * 2
    async with asyncio.timeout(30):
        with pytest.raises(ScoringError, match=r"w was not judged within 0\.05 s.*by slow"):
            await module._ask_all(members, work)


async def test_a_database_that_does_not_answer_in_time_is_no_slow_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def times_out(*_: object, **__: object) -> AsyncIterator[None]:
        raise TimeoutError  # as asyncpg does
        yield

    monkeypatch.setattr(module, "open_judge", times_out)
    with pytest.raises(TimeoutError):
        await module._ask_all([JudgeSettings(model="fast", timeout_s=600)], work_in(tmp_path))


async def test_a_local_judge_whose_engine_dies_while_it_loads_fails_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(dies, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    @asynccontextmanager
    async def opens(judge: JudgeSettings, *_: object, **__: object) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as session:
            await _load(session, url, tmp_path / "large")
        yield

    monkeypatch.setattr(module, "open_judge", opens)
    async with server, asyncio.timeout(30):
        with pytest.raises(ServingError, match=r"large' does not load: .*ServerDisconnectedError"):
            await module._ask_all([JudgeSettings(model="m")], work_in(tmp_path))

"""Conversations that this gateway tells the others."""

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from babylon.serving.gateway.play import sessions
from babylon.serving.gateway.play.sessions import Sessions
from babylon.store import Store


async def test_two_equal_conversations_between_two_writes_name_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: asyncio.Future[Mapping[bytes, str | None]] = asyncio.Future()

    async def note(store: Store, found: Mapping[bytes, str | None]) -> None:
        written.set_result(found)

    monkeypatch.setattr(sessions, "note_continuations", note)
    known = Sessions(cast(Store, None))
    known.note(b"same", "first")
    known.note(b"own", "first")
    known.note(b"same", "second")
    running = asyncio.create_task(known.run())
    async with asyncio.timeout(20):
        assert await written == {b"same": None, b"own": "first"}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_conversations_of_an_outage_are_written_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: asyncio.Future[Mapping[bytes, str | None]] = asyncio.Future()
    tries = 0

    async def note(store: Store, found: Mapping[bytes, str | None]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            known.note(b"other", "second")
            raise OSError("the database is away")
        written.set_result(found)

    monkeypatch.setattr(sessions, "note_continuations", note)
    known = Sessions(cast(Store, None))
    known.note(b"one", "first")
    running = asyncio.create_task(known.run())
    async with asyncio.timeout(20):
        assert await written == {b"one": "first", b"other": "second"}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

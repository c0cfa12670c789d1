"""Queries that a call waits for briefly, and goes on without if the database does not answer."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from babylon.store.connection import UNREACHABLE

log = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_S = 0.25  # the longest that a call waits for the database


class BriefQueries:
    """The queries under way."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def ask(self, query: Coroutine[Any, Any, T]) -> T | None:
        """Return the query's result, ``None`` if it fails or does not come in time."""
        task = asyncio.create_task(query)
        self._running.add(task)
        task.add_done_callback(self._on_answer)
        await asyncio.wait([task], timeout=ANSWER_S)
        if task.done() and not task.exception():
            return task.result()
        task.cancel()  # not awaited: cancelling a query may take as long as its answer
        return None

    def _on_answer(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            if not isinstance(error, UNREACHABLE):
                raise error
            log.debug("a call goes on without the database: %r", error)

"""The owners of trajectories: the key that began one is the only one that may name it.

The database decides, and this process caches its answers, so only the first call of a trajectory
asks. A call that must not wait for the database is answered; its record names its key, and
collection leaves out calls of other keys than the owner's.
"""

import asyncio
import logging
import re
from contextlib import suppress
from typing import NoReturn

from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.plays import claim_play

log = logging.getLogger(__name__)

ANSWER_S = 0.25  # the longest that a call waits for the database
RETRY_S = 0.25
MAX_CACHED = 100_000  # trajectories, about 20 MB; the database has the others
SESSION = "session-"
_SESSION = re.compile(SESSION + r"(\w+)-[0-9a-f]{16}")  # other ids may begin so too
_Claim = tuple[str, str | None]  # key id, agent id


class TrajectoryOwners:
    """Key id of each trajectory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owners: dict[str, str] = {}
        self._unsaved: dict[str, _Claim] = {}
        self._queries: set[asyncio.Task[str]] = set()

    async def require(self, trajectory_id: str, key_id: str, agent_id: str | None) -> None:
        """Check that the trajectory is the key's; a trajectory without an owner becomes its own.

        Raises:
            RequestError: 403, it belongs to another key.
        """
        owner = session_owner(trajectory_id) or self._owners.get(trajectory_id)
        if owner is None:
            owner = await self._ask(trajectory_id, (key_id, agent_id))
            self._owners[trajectory_id] = owner
            if len(self._owners) > MAX_CACHED:
                del self._owners[next(iter(self._owners))]
        if owner != key_id:
            raise wrong_key(trajectory_id)

    async def run(self) -> NoReturn:
        """Write the claims that were decided without the database, once it answers again."""
        while True:
            await asyncio.sleep(RETRY_S)
            for trajectory_id, claim in list(self._unsaved.items()):
                with suppress(*UNREACHABLE):  # RouteFollower reports them
                    owner = await claim_play(self._store.pool, trajectory_id, *claim)
                    self._owners[trajectory_id] = owner
                    del self._unsaved[trajectory_id]

    async def _ask(self, trajectory_id: str, claim: _Claim) -> str:
        query = asyncio.create_task(claim_play(self._store.pool, trajectory_id, *claim))
        self._queries.add(query)
        query.add_done_callback(self._on_answer)
        await asyncio.wait([query], timeout=ANSWER_S)
        if query.done() and not query.exception():
            return query.result()
        query.cancel()  # not awaited: cancelling a query may take as long as its answer
        return self._unsaved.setdefault(trajectory_id, claim)[0]

    def _on_answer(self, query: asyncio.Task[str]) -> None:
        self._queries.discard(query)
        if not query.cancelled() and (error := query.exception()):
            if not isinstance(error, UNREACHABLE):
                raise error
            log.debug("the owner is decided without the database: %r", error)


def session_owner(trajectory_id: str) -> str | None:
    """Return the key id in the id of a recognised session, None for any other trajectory."""
    found = _SESSION.fullmatch(trajectory_id)
    return found[1] if found else None


def wrong_key(trajectory_id: str) -> RequestError:
    """Return the refusal of a caller who is not the trajectory's owner."""
    return RequestError(
        403,
        f"trajectory {trajectory_id!r:.80} belongs to another key: use that key, or an id of your"
        " own, best a random one",
        code="wrong_key",
    )

"""The owners of trajectories: the key that began one is the only one that may name it.

The database decides, and this process caches its answers, so only the first call of a trajectory
asks. A call that must not wait for the database is answered; its record names its key, and
collection leaves out calls of other keys than the owner's.
"""

import asyncio
import re
from contextlib import suppress
from itertools import islice
from typing import NoReturn

from cachetools import TTLCache

from babylon.serving.gateway.brief_queries import BriefQueries
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.plays import Owner, PlayClaim, claim_plays

RETRY_S = 0.25
MAX_CACHED = 100_000  # trajectories, about 36 MB; the database has the others
REMEMBERED_S = 3600.0  # so that memory follows the fleet's size and not its age
MAX_UNSAVED = 100_000  # claims while the database is away
_BATCH = 1000  # claims of one query
SESSION = "session-"
_SESSION = re.compile(SESSION + r"(\w+)-[0-9a-f]{16}")  # other ids may begin so too


class TrajectoryOwners:
    """Owner of each trajectory.

    While the database is away, the first caller of a trajectory is taken for its owner. When too
    many such claims wait, the oldest is forgotten, as if nobody had named its trajectory yet: its
    next call claims it again. A refusal would let one key's ids keep all other keys from theirs.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owners = TTLCache[str, Owner](MAX_CACHED, REMEMBERED_S)
        self._unsaved: dict[str, PlayClaim] = {}
        self._queries = BriefQueries()

    async def require(self, trajectory_id: str, key_id: str, agent_id: str | None) -> str | None:
        """Check that the trajectory is the key's; a trajectory without an owner becomes its own.

        Returns:
            The agent of the call: ``agent_id``, else that of a trajectory that was started before
            its first call.

        Raises:
            RequestError: 403, it belongs to another key.
        """
        if session := session_owner(trajectory_id):
            owner: Owner = session, None
        elif (known := self._owners.get(trajectory_id)) is not None:
            owner = known
        else:
            owner = await self._ask(trajectory_id, (key_id, agent_id))
            self._owners[trajectory_id] = owner
        if owner[0] != key_id:
            raise wrong_key(trajectory_id)
        return agent_id or owner[1]

    async def run(self) -> NoReturn:
        """Write the claims that were decided without the database, once it answers again."""
        while True:
            await asyncio.sleep(RETRY_S)
            with suppress(*UNREACHABLE):  # RouteFollower reports them
                while batch := dict(islice(self._unsaved.items(), _BATCH)):
                    owners = await claim_plays(self._store.pool, batch)
                    self._owners.update({o: owners[o] for o in owners.keys() & self._owners})
                    for trajectory_id in batch:
                        self._unsaved.pop(trajectory_id, None)

    async def _ask(self, trajectory_id: str, claim: PlayClaim) -> Owner:
        claim = self._unsaved.get(trajectory_id, claim)  # an earlier one comes first
        query = claim_plays(self._store.pool, {trajectory_id: claim})
        if (owners := await self._queries.ask(query)) is not None:
            return owners[trajectory_id]
        return self._claimed(trajectory_id, claim)

    def _claimed(self, trajectory_id: str, claim: PlayClaim) -> Owner:
        """Keep a claim until the database answers; return the owner."""
        owner, _ = self._unsaved.setdefault(trajectory_id, claim)
        if len(self._unsaved) > MAX_UNSAVED:
            oldest = next(iter(self._unsaved))
            del self._unsaved[oldest]
            self._owners.pop(oldest, None)
        return owner, None


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

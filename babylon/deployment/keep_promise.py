"""The return to the previous champion, once the fleet's own play shows that it earned more than
the present one.
"""

import asyncio
import logging

from babylon.core.errors import ArtifactError, ModelError, ServingError
from babylon.core.trajectories import read_trajectories
from babylon.core.types import Change, Claim
from babylon.core.windows import parse_window_id
from babylon.deployment.change import ChangeRequest
from babylon.deployment.rollback import roll_back
from babylon.evaluation.arena.engine_players import entered
from babylon.evaluation.arena.fleet_promise import broken_promise, own_worlds, pairs_of
from babylon.evaluation.arena.players import Player, policy_player
from babylon.evaluation.rebuild.recorded_windows import played_rows, rebuild_rows
from babylon.store.connection import Store
from babylon.store.fleet_pairs import FleetPair, add_pairs
from babylon.store.routes import Route, previous_champion
from babylon.store.windows import get_window

MOST_ROWS = 256  # of a window
log = logging.getLogger(__name__)


async def keep_promise(
    store: Store, seed: int, route: Route, claim: Claim, model: str
) -> Change | None:
    """Add the window's play to the evidence, and roll back if the previous policy is surely better.

    The previous policy plays through the engine that serves ``model``, if there is one.

    Return the change of the route, if there is one.

    Nothing is done while an experiment runs, or if no other policy was champion before.

    Raises:
        BabylonError: As ``roll_back`` raises it.
    """
    if route.split is not None or store.game_problem:
        return None
    try:
        before = await previous_champion(store)
    except ModelError:  # the base model serves
        return None
    if before.removed_at is not None:
        return None
    champion = route.policy_version
    try:
        player = policy_player(store.home, before, seed)
        pairs = await _pairs(store, seed, claim, champion, player, model)
    except (
        ArtifactError,
        ModelError,
        ServingError,
    ) as error:  # evidence that is gone decides nothing
        log.warning("window %s is not compared with the policy before: %s", claim.window_id, error)
        return None
    pairs = await add_pairs(store, claim, champion, before.policy_version, pairs)
    if (difference := broken_promise(pairs)) is None:
        return None
    reason = (
        f"the fleet earned {difference} a play over policy {before.policy_version} in the same"
        f" {len(pairs)} worlds: a loss, although the gate saw a gain"
    )
    log.warning("policy %d is taken back: %s", champion, reason)
    request = ChangeRequest(author=claim.owner, reason=reason, claim=claim, route=route)
    return await roll_back(store, request)


async def _pairs(
    store: Store, seed: int, claim: Claim, champion: int, predecessor: Player, model: str
) -> list[FleetPair]:
    """Return the pairs of the window; none if its play or its worlds are unknown."""
    row = await get_window(store, claim.window_id)
    if row is None or row.scored is None:
        return []
    found = await asyncio.to_thread(read_trajectories, store.home, row.scored.artifact)
    window = parse_window_id(claim.window_id.partition("+")[0], row.minutes)
    rows = await played_rows(store, window, apart_from=(), most=MOST_ROWS)
    rebuilt = await asyncio.to_thread(rebuild_rows, rows)
    played = {own.trajectory_id: own for own in found}
    if not (worlds := own_worlds(rebuilt.scenarios, played, champion)):
        return []
    async with entered(store, model, seed, [predecessor]) as (decide,):
        return await asyncio.to_thread(pairs_of, worlds, decide)

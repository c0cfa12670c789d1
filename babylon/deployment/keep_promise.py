"""The return to a known policy, once the fleet's own play shows that the champion earns less.

The policy before the champion may be as lost as it when the market turns. The base model is then
better, and learns again what a policy that became sure of itself can no longer try.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping

from babylon.core.errors import ArtifactError, ModelError, RouteConflictError, ServingError
from babylon.core.trajectories import read_trajectories
from babylon.core.types import Change, Claim, Verdict
from babylon.core.windows import parse_window_id
from babylon.deployment.change import ChangeRequest
from babylon.deployment.rollback import roll_back
from babylon.evaluation.arena.confidence import Interval
from babylon.evaluation.arena.engine_players import entered
from babylon.evaluation.arena.fleet_promise import broken_promise, own_worlds, pairs_of
from babylon.evaluation.arena.players import Player, policy_player
from babylon.evaluation.rebuild.recorded import RecordedScenario
from babylon.evaluation.rebuild.recorded_windows import played_rows, rebuild_rows
from babylon.quality.decode import OF_POOR_PLAY
from babylon.store.connection import Store
from babylon.store.fleet_pairs import FleetPair, add_pairs, paired_worlds
from babylon.store.policies import Policy, get_policy
from babylon.store.rejections import policies_of_collected, policies_of_rejected
from babylon.store.routes import (
    Route,
    all_routes,
    earlier_turn_ended,
    may_serve,
    previous_champion,
)
from babylon.store.windows import get_window

BASE = 0  # version of the base model
MOST_ROWS = 256  # of a window
log = logging.getLogger(__name__)


async def keep_promise(
    store: Store, seed: int, route: Route, claim: Claim, model: str, verdict: Verdict | None = None
) -> Change | None:
    """Add the window's play to the evidence, and go back to a policy that is surely better.

    Nothing is done while an experiment runs, or if no other policy was champion before. A rival
    that cannot play this window is judged by the windows before.

    Args:
        model: name of the served model. The engine that serves it plays the other policies, if
            there is one.
        verdict: of the window's own checkpoint, if it has one. One that is promoted and gains more
            than the return does is to be deployed instead.

    Returns:
        The change of the route, if there is one.

    Raises:
        BabylonError: As ``roll_back`` raises it; not if the gateways cannot load the policy and the
            window has a promoted checkpoint.
    """
    if route.split is not None or store.game_problem:
        return None
    champion, rivals = route.policy_version, await _rivals(store, route)
    players = {one.policy_version: policy_player(store.home, one, seed) for one in rivals}
    found = await _pairs(store, seed, claim, champion, players, model)
    lost: dict[int, Interval] = {}
    # Who makes a policy champion again knows why it was taken back.
    since = earlier_turn_ended(await all_routes(store), champion)
    for rival, pairs in zip(rivals, found, strict=True):
        version = rival.policy_version
        windows = await add_pairs(store, claim, champion, version, pairs, since=since)
        # In a thread, because the event loop also renews the window's lease.
        if difference := await asyncio.to_thread(broken_promise, windows, len(rivals)):
            lost[version] = difference
    better = min(lost, key=lambda version: lost[version].mean, default=None)
    if better is None or (verdict and verdict.promote and _gains_more(verdict, -lost[better].mean)):
        return None
    reason = (
        f"the fleet earned {lost[better]} a play over policy {better} in the same worlds:"
        " a loss, although the gate saw a gain"
    )
    log.warning("policy %d is taken back: %s", champion, reason)
    request = ChangeRequest(author=claim.owner, reason=reason, claim=claim, route=route)
    try:
        return await roll_back(store, request, better)
    except RouteConflictError:
        raise
    except ServingError as error:
        # A policy that nobody can load must not hold up a better one, hour after hour.
        if not (verdict and verdict.promote):
            raise
        log.error("policy %d does not return: %s", better, error)
        return None


def _gains_more(verdict: Verdict, usd: float) -> bool:
    """Return whether a promoted checkpoint gains at least as much as a return to a rival.

    An evaluator's score is what its user wants, and no number of dollars.
    """
    gain = (verdict.pnl_after or 0.0) - (verdict.pnl_before or 0.0)
    return gain >= usd or not verdict.in_dollars


async def _rivals(store: Store, route: Route) -> list[Policy]:
    """Return the policy that the champion replaced and the base model, if they may serve."""
    try:
        before = await previous_champion(store)
    except ModelError:  # the base model serves
        return []
    known = {one.policy_version: one for one in (before, await get_policy(store, BASE))}
    known.pop(route.policy_version, None)
    return [one for version, one in known.items() if await may_serve(store, version)]


async def _pairs(
    store: Store, seed: int, claim: Claim, champion: int, rivals: Mapping[int, Player], model: str
) -> list[list[FleetPair]]:
    """Return the window's pairs with each rival; none if its play or its worlds are unknown."""
    try:
        worlds = await _worlds(store, claim, champion) if rivals else []
    except ArtifactError as error:  # evidence that is gone decides nothing
        log.warning("window %s is not compared with other policies: %s", claim.window_id, error)
        worlds = []
    pairs: list[list[FleetPair]] = []
    for version, rival in rivals.items():
        # A window that is tried again for hours is played once.
        known = await paired_worlds(store, claim.window_id, champion, version)
        new = [one for one in worlds if one.scenario.scenario_id not in known]
        pairs.append([])
        try:
            if new:
                async with entered(store, model, seed, [rival]) as (decide,):
                    pairs[-1] = await asyncio.to_thread(pairs_of, new, decide)
        except (ArtifactError, ModelError, ServingError) as error:
            log.warning("%s does not play window %s: %s", rival.name, claim.window_id, error)
    return pairs


async def _worlds(store: Store, claim: Claim, champion: int) -> list[RecordedScenario]:
    """Return the window's worlds that the champion alone played, and of which all play is known."""
    row = await get_window(store, claim.window_id)
    if row is None:
        return []
    # A world counts only if all of its play is known: also what dropout left out, and what was
    # rejected because it was played badly. Without the latter, the champion would look better; of
    # a window that was never scored, the former alone would make it look worse.
    players: dict[str, Collection[int | None]] = {}
    policies = policies_of_rejected if row.scored else policies_of_collected
    players |= await policies(store, claim.window_id, OF_POOR_PLAY)
    for part in filter(None, (row.scored.artifact, row.scored.held_out) if row.scored else ()):
        found = await asyncio.to_thread(read_trajectories, store.home, part)
        players |= {own.trajectory_id: {c.policy_version for c in own.calls} for own in found}
    window = parse_window_id(claim.window_id.partition("+")[0], row.minutes)
    rows = await played_rows(store, window, apart_from=(), most=MOST_ROWS)
    rebuilt = await asyncio.to_thread(rebuild_rows, rows)
    return own_worlds(rebuilt.scenarios, players, champion)

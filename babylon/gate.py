"""The gate: challenger and champion play the same unseen scenarios; only not-worse passes."""

import asyncio
from dataclasses import asdict, replace
from statistics import fmean

import msgspec

from babylon.diagnostics import ruled_out
from babylon.market.arena import ArenaResult, play, replies
from babylon.market.scenario import Scenario, make_scenario
from babylon.promotion import RESTORER
from babylon.settings import Settings
from babylon.store.connection import Store
from babylon.store.policies import Policy, champion, descends, get_policy, set_verdict
from babylon.store.routes import Route, list_routes
from babylon.types import Trained, Verdict


async def validate_checkpoint(store: Store, settings: Settings, trained: Trained) -> Verdict:
    """Play the window's own scenario suite, which no training saw, and decide.

    A verdict that an earlier run of the window left stands while the route it is about is in force.
    An update that its own training rules out is rejected without a game.

    Raises:
        ModelError: a checkpoint does not load.
    """
    serving, route_version = await champion(store)
    if earlier := await _earlier_verdict(store, trained, serving, route_version):
        return earlier
    if reason := ruled_out(trained.metrics):
        verdict = Verdict(
            claim=trained.claim,
            policy_version=trained.policy_version,
            route_version=route_version,
            promote=False,
            reason=reason,
        )
    else:
        verdict = await _played(store, settings, trained, serving, route_version)
    await set_verdict(store, trained.claim, trained.policy_version, asdict(verdict))
    return verdict


async def _played(
    store: Store, settings: Settings, trained: Trained, serving: Policy, route_version: int
) -> Verdict:
    """Both policies meet the same worlds (common random numbers), so the differences are paired."""
    from babylon.checkpoints.verdict import decide, paired_difference

    if serving.policy_version == trained.policy_version:  # deployed, then crashed: say it again
        serving = await get_policy(store, trained.parent_version)
    suite = unseen_scenarios(
        "gate", f"{settings.seed}:{trained.batch_id}", settings.arena_scenarios
    )
    before = await asyncio.to_thread(play_checkpoint, serving.uri, suite, settings.seed)
    after = await asyncio.to_thread(play_checkpoint, trained.checkpoint_uri, suite, settings.seed)
    difference = paired_difference(before.pnl, after.pnl)
    promote, reason = decide(
        difference, fmean(before.malformed), fmean(after.malformed), settings.arena_margin_usd
    )
    return Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=promote,
        reason=reason,
        scenarios=len(suite),
        pnl_before=before.mean_pnl,
        pnl_after=after.mean_pnl,
        pnl_difference_low=difference.low,
        pnl_difference_high=difference.high,
        win_rate_before=fmean(before.win_rate),
        win_rate_after=fmean(after.win_rate),
        malformed_before=fmean(before.malformed),
        malformed_after=fmean(after.malformed),
    )


async def _earlier_verdict(
    store: Store, trained: Trained, serving: Policy, route_version: int
) -> Verdict | None:
    """What a run that died left behind, if it still holds."""
    stored = (await get_policy(store, trained.policy_version)).verdict
    if stored is None:
        return None
    verdict = replace(msgspec.convert(stored, Verdict), claim=trained.claim)
    serves = serving.policy_version == trained.policy_version
    if serves or await descends(store, serving.policy_version, trained.policy_version):
        return verdict
    if verdict.route_version == route_version:
        return verdict
    if (route := await _taken_back(store, trained.policy_version)) and route.author != RESTORER:
        reason = f"was in force, and taken back by {route.author}: {route.reason}"
        return replace(verdict, promote=False, reason=reason)
    return None


async def _taken_back(store: Store, policy_version: int) -> Route | None:
    """The route that last ended the policy's turn, if it ever had one."""
    after: Route | None = None
    for route in await list_routes(store, limit=10_000):  # newest first
        if route.policy_version == policy_version:
            return after
        after = route
    return None


def unseen_scenarios(purpose: str, name: str, count: int) -> list[Scenario]:
    """Seeded worlds kept for one purpose: neither fleets nor transcripts use such names."""
    return [make_scenario(f"{purpose}:{name}:{number}") for number in range(count)]


def play_checkpoint(path: str, suite: list[Scenario], seed: int) -> ArenaResult:
    """Load a checkpoint and let it play a suite. Blocking."""
    from babylon.engine.reply import reply_policy

    return play(replies(reply_policy(path, seed=seed)), suite)

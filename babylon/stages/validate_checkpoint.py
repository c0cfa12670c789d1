"""Stage ``validate checkpoint``: a challenger must clearly beat the champion before it serves.

Each window's gate plays worlds of its own, seeded by its batch (see
``babylon.evaluation.arena.suite``). Only the arena promotes; held-out recorded play can only veto.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

import msgspec

from babylon.core.home import Home
from babylon.core.settings import EvaluationSettings, Settings
from babylon.core.types import Trained, Verdict
from babylon.evaluation.arena.held_out import held_out_check
from babylon.evaluation.arena.match import Match, Progress, compare
from babylon.evaluation.arena.match_page import write_report
from babylon.evaluation.arena.play import result_of, yardsticks
from babylon.evaluation.arena.players import checkpoint_player
from babylon.evaluation.arena.suite import digest, unseen_scenarios
from babylon.game.market.scenario import PRESETS, Scenario
from babylon.store.connection import Store
from babylon.store.lineage import descends
from babylon.store.policies import Policy, champion, get_policy, set_verdict
from babylon.store.routes import RESTORER, all_routes, same_champion_since, taken_back
from babylon.training.progress_directory import claim_name
from babylon.training.update_health import ruled_out


async def validate_checkpoint(
    store: Store, settings: Settings, trained: Trained, *, progress: Progress | None = None
) -> Verdict:
    """Compare challenger and champion on unseen worlds, and store the verdict.

    The verdict of an earlier run of the window stands while the route that it is about is in force.
    An update whose own metrics rule it out is rejected without a game.

    Raises:
        ModelError: a checkpoint does not load.
    """
    serving, route_version = await champion(store)
    if earlier := await _earlier_verdict(store, trained, serving):
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
        verdict = await _met(
            store,
            trained,
            serving,
            route_version,
            progress,
            home=settings.home,
            seed=settings.seed,
            evaluation=settings.evaluation,
            max_tokens=settings.training.max_tokens,
        )
    # Rejections are stored too: a run that resumes must not play the match again.
    await set_verdict(store, trained.claim, trained.policy_version, asdict(verdict))
    return verdict


async def _met(
    store: Store,
    trained: Trained,
    serving: Policy,
    route_version: int,
    progress: Progress | None,
    *,
    home: Home,
    seed: int,
    evaluation: EvaluationSettings,
    max_tokens: int | None,
) -> Verdict:
    """Play the match, check a winner against recorded play, and write the report."""
    if serving.policy_version == trained.policy_version:  # deployed before a crash
        serving = await get_policy(store, trained.parent_version)
    worlds = await asyncio.to_thread(
        unseen_scenarios,
        "gate",
        f"{seed}:{trained.batch_id}",
        evaluation.scenarios,
        PRESETS[evaluation.rules],
    )
    match = await compare(
        await asyncio.to_thread(checkpoint_player, serving.uri, seed),
        await asyncio.to_thread(checkpoint_player, home.resolve(trained.checkpoint_uri), seed),
        worlds,
        progress,
    )
    verdict = _verdict(trained, route_version, match, await asyncio.to_thread(digest, worlds))
    if verdict.promote:
        check = await held_out_check(store, trained, max_tokens)
        verdict = replace(verdict, off_policy=check)
        if check.veto:
            reason = f"vetoed by recorded play, {check}; in the arena, {verdict.reason}"
            verdict = replace(verdict, promote=False, reason=reason)
    return await asyncio.to_thread(_reported, home, verdict, match, worlds)


def _verdict(trained: Trained, route_version: int, match: Match, suite_digest: str) -> Verdict:
    before, after = match.champion, match.challenger
    difference = match.looks[-1].difference
    return Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=match.ruling == "promote",
        insufficient=match.ruling == "insufficient",
        reason=match.reason,
        scenarios=match.looks[-1].scenarios,
        suite_digest=suite_digest,
        pnl_before=before.mean_pnl,
        pnl_after=after.mean_pnl,
        pnl_difference_low=difference.low,
        pnl_difference_high=difference.high,
        win_rate_before=float(before.win_rate.mean()),
        win_rate_after=float(after.win_rate.mean()),
        malformed_before=float(before.malformed.mean()),
        malformed_after=float(after.malformed.mean()),
        drawdown_before=float(before.drawdown.mean()),
        drawdown_after=float(after.drawdown.mean()),
    )


def _reported(home: Home, verdict: Verdict, match: Match, worlds: Sequence[Scenario]) -> Verdict:
    """Add the yardsticks to the verdict and write the report's directory. Blocking."""
    scripted = yardsticks(worlds[: verdict.scenarios])
    directory = home.arena / claim_name(verdict.claim)
    verdict = replace(
        verdict,
        yardsticks={name: result.mean_pnl.mean for name, result in scripted.items()},
        report=home.reference(directory),
    )
    results = {
        "champion": result_of(match.champion),
        "challenger": result_of(match.challenger),
        **scripted,
    }
    write_report(directory, results, match.looks, {"verdict": asdict(verdict)})
    return verdict


async def _earlier_verdict(store: Store, trained: Trained, serving: Policy) -> Verdict | None:
    """Return the verdict of an earlier run, if it still holds.

    A rejection is final. A promotion holds if its policy or a descendant serves, or if the champion
    that it is about still does. If the policy was deployed and taken back since, the verdict
    becomes a rejection.
    """
    stored = (await get_policy(store, trained.policy_version)).verdict
    if stored is None:
        return None
    verdict = replace(msgspec.convert(stored, Verdict), claim=trained.claim)
    routes, version = await all_routes(store), trained.policy_version
    if not verdict.promote:
        return verdict
    if version in routes[0].versions or await descends(store, serving.policy_version, version):
        return verdict
    if (route := taken_back(routes, version)) and route.author != RESTORER:
        reason = f"was in force, and taken back by {route.author}: {route.reason}"
        return replace(verdict, promote=False, reason=reason)
    return verdict if same_champion_since(routes, verdict.route_version) else None

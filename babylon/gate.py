"""The gate: challenger and champion play the same unseen scenarios; only not-worse passes."""

import asyncio
from dataclasses import asdict
from statistics import fmean

from babylon.market.arena import ArenaResult, play, replies
from babylon.market.scenario import Scenario, make_scenario
from babylon.settings import Settings
from babylon.store.connection import Store
from babylon.store.policies import champion, get_policy, set_verdict
from babylon.types import Trained, Verdict


async def validate_checkpoint(store: Store, settings: Settings, trained: Trained) -> Verdict:
    """Play the window's own scenario suite, which no training saw, and decide.

    Both policies meet the same worlds (common random numbers), so the differences are paired.

    Raises:
        ModelError: a checkpoint does not load.
    """
    from babylon.checkpoints.verdict import decide, paired_difference

    before_policy, _ = await champion(store)
    if (
        before_policy.policy_version == trained.policy_version
    ):  # deployed, then crashed: say it again
        before_policy = await get_policy(store, trained.parent_version)
    suite = unseen_scenarios(
        "gate", f"{settings.seed}:{trained.batch_id}", settings.arena_scenarios
    )
    before = await asyncio.to_thread(play_checkpoint, before_policy.uri, suite, settings.seed)
    after = await asyncio.to_thread(play_checkpoint, trained.checkpoint_uri, suite, settings.seed)
    difference = paired_difference(before.pnl, after.pnl)
    promote, reason = decide(
        difference, fmean(before.malformed), fmean(after.malformed), settings.arena_margin_usd
    )
    verdict = Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
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
    await set_verdict(store, trained.claim, trained.policy_version, asdict(verdict))
    return verdict


def unseen_scenarios(purpose: str, name: str, count: int) -> list[Scenario]:
    """Seeded worlds kept for one purpose: neither fleets nor transcripts use such names."""
    return [make_scenario(f"{purpose}:{name}:{number}") for number in range(count)]


def play_checkpoint(path: str, suite: list[Scenario], seed: int) -> ArenaResult:
    """Load a checkpoint and let it play a suite. Blocking."""
    from babylon.engine.reply import reply_policy

    return play(replies(reply_policy(path, seed=seed)), suite)

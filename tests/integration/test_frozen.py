"""A winner that plays worse on the frozen suite than the best policy of the line is refused."""

from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from babylon.core.types import Claim, Verdict
from babylon.evaluation.arena.frozen import compared, frozen_check, suite_of, withheld
from babylon.evaluation.arena.play import PlayerResult, play, result_of, scripted
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import simulated
from babylon.game.market.scenario import STARTER
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.store import Store
from babylon.store.policies import ensure_base

NEWS, CONTRARIAN = (scripted(SCRIPTED_AGENTS[name]) for name in ("news", "contrarian"))
PROMOTED = Verdict(
    claim=Claim(window_id="w", epoch=1, owner="worker"),
    policy_version=2,
    route_version=1,
    promote=True,
    reason="a gain",
)


def result(mean: float, malformed: float = 0.0) -> PlayerResult:
    """A player whose worlds differ by $100."""
    pnl = mean + 100.0 * np.random.default_rng(0).standard_normal(256)
    return PlayerResult(
        pnl=tuple(pnl.tolist()), equity=(0.0,), win_rate=0.5, malformed=malformed, drawdown=0.0
    )


async def test_the_best_policy_of_the_line_is_the_measure_and_plays_once(
    store: Store, tmp_path: Path
) -> None:
    await ensure_base(store, uri=str(tmp_path), base_model="embedded")
    worlds = simulated(unseen_scenarios("gate", "w", 256))
    first = await frozen_check(store, worlds, {0: NEWS, 1: NEWS}, 1, 0)
    assert first.problem is None and first.pnl == first.best_pnl and first.scenarios == 32
    own = result_of(play(NEWS, suite_of(STARTER, 256))).mean_pnl.mean
    assert first.pnl == pytest.approx(own)

    # the serving policy is as bad as the challenger, and the base model, which served, is better
    later = await frozen_check(store, worlds, {2: CONTRARIAN, 3: CONTRARIAN}, 3, 0)
    assert later.best_version == 0 and later.suite_digest == first.suite_digest
    assert later.problem is not None and "to policy 0 is -" in later.problem
    verdict = withheld(PROMOTED, later)
    assert not verdict.promote and verdict.evidence == "the frozen suite"
    assert verdict.reason.startswith("forgotten: ") and verdict.reason.endswith("a gain")
    assert withheld(PROMOTED, first) == replace(PROMOTED, frozen=first)


async def test_a_fleet_that_moves_into_shared_markets_has_forgotten_nothing(
    store: Store, tmp_path: Path
) -> None:
    """The same play earns less the more agents share a market."""
    await ensure_base(store, uri=str(tmp_path), base_model="embedded")
    alone = simulated(unseen_scenarios("gate", "w", 256))
    await frozen_check(store, alone, {0: NEWS, 1: NEWS}, 1, 0)
    shared = simulated(alone.scenarios, seats=8)
    check = await frozen_check(store, shared, {1: NEWS, 2: NEWS}, 2, 0)
    assert check.problem is None and check.pnl == check.best_pnl and check.best_version == 1


def test_other_rules_have_another_suite_and_the_same_rules_the_same() -> None:
    assert suite_of(STARTER, 2048) == suite_of(STARTER, 2048)
    assert len(suite_of(STARTER, 2048)) == 256
    others = suite_of(replace(STARTER, news_reliability=0.05), 2048)
    assert not {world.scenario_id for world in others} & {
        world.scenario_id for world in suite_of(STARTER, 2048)
    }


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        (result(300), None),
        (result(260), None),  # less, but not by more than 5 % of $1,000
        (result(240), "P&L difference to policy 1 is -60.0"),
        # two points at each of three gates are six in all
        (result(300, 0.06), "malformed replies are 6.0%, of an earlier policy 0.0%"),
    ],
)
def test_losses_and_malformed_replies_add_up(own: PlayerResult, problem: str | None) -> None:
    line = {0: result(0), 1: result(300, 0.02), 2: result(290, 0.04)}
    found = compared(own, line, STARTER, "digest").problem
    assert found is None if problem is None else found is not None and problem in found


def replying(worlds: int, malformed: float, seed: int) -> PlayerResult:
    """A player of five replies a world, each malformed with the same probability."""
    shares = np.random.default_rng(seed).binomial(5, malformed, worlds) / 5
    whole = result(0, float(shares.mean()))
    return replace(whole, pnl=(0.0,) * worlds, malformed_shares=tuple(shares.tolist()))


@pytest.mark.parametrize("worlds", [32, 256])
def test_the_luckiest_of_a_long_line_vetoes_no_equal_policy(worlds: int) -> None:
    line = {seed: replying(worlds, 0.06, seed) for seed in range(200)}

    def vetoed(malformed: float) -> int:
        tried = (replying(worlds, malformed, 200 + seed) for seed in range(40))
        return sum(compared(own, line, STARTER, "digest").problem is not None for own in tried)

    assert vetoed(0.06) <= 2
    assert vetoed(0.11) >= 30 or worlds == 32


def test_results_of_earlier_versions_are_read() -> None:
    stored = asdict(result(0, 0.02))
    del stored["malformed_shares"]
    assert msgspec.convert(stored, PlayerResult) == result(0, 0.02)

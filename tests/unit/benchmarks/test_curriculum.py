"""Runs of the curriculum are kept, and not run again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from babylon.game.market.scenario import HOUR, STARTER, make_scenario
from babylon.game.market.words import NEWS, PERP_NEWS
from benchmarks.curriculum import __main__ as program
from benchmarks.curriculum import ppo
from benchmarks.curriculum.figures import curve
from benchmarks.curriculum.population import members
from benchmarks.curriculum.results import RunKey, RunResult, differences, stored, table
from benchmarks.curriculum.stability import course
from benchmarks.curriculum.wording import NEW_NEWS, NEW_PERP_NEWS, reworded


def result(key: RunKey, gain: float) -> RunResult:
    return RunResult(
        key=key,
        pnl=40 + gain,
        malformed=0.01,
        base_pnl=40,
        rule="bold",
        rule_pnl=500,
        gain=(gain, gain - 5, gain + 5),
        beside=(gain - 460, gain - 470, gain - 450),
        decisions=100,
        cpu_s=60,
        curve=([1, 2.0],),
        by_world=(gain - 5, gain + 5),
    )


def test_a_run_that_has_a_result_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[RunKey] = []

    def run(key: RunKey, base: Path, looks: list[int], place: Path) -> tuple[RunResult, Path]:
        ran.append(key)
        return result(key, 100.0 + 20 * key.seed), base

    monkeypatch.setattr(program, "run", run)
    common = ["--base", "/models/b", "--results", str(tmp_path), "--level", "L1"]
    program.main([*common, "--seeds", "0", "1"])
    program.main([*common, "--seeds", "0", "1", "2"])
    program.main([*common, "--seeds", "0", "--set", "discount=0.5"])
    assert [(key.seed, key.settings) for key in ran] == [
        (0, ()),
        (1, ()),
        (2, ()),
        (0, ("discount=0.5",)),
    ]
    assert stored(tmp_path).keys() == set(ran)
    program.main(["--table", "--results", str(tmp_path)])
    assert len(ran) == 4
    assert "| L1 | ours | 8 × 64 | 3 | 160 | +120 [+100, +140] |" in capsys.readouterr().out


def test_arms_of_the_same_seed_and_worlds_are_compared() -> None:
    key = RunKey(level="L3", arm="ours", seed=0, hours=1, agents=8, worlds=3, base="b")
    runs = [
        replace(result(replace(key, seed=seed, arm=arm), 0.0), by_world=by_world)
        for arm, seed, by_world in [
            ("ours", 0, (10.0, 20.0, 30.0)),
            ("sft", 0, (8.0, 16.0, 27.0)),
            ("ours", 1, (11.0, 21.0, 31.0)),
            ("sft", 1, (10.0, 17.0, 26.0)),
            ("ours", 2, (500.0, 500.0, 500.0)),  # no sft of this seed
        ]
    ]
    other_base = replace(runs[0], key=replace(key, arm="trl"), base_pnl=41.0)
    assert differences([*runs, other_base])[2:] == [
        "| L3 | 1 × 8 | ours | sft | 2 | +3 [+2, +5] | [+0, +6] (+3, +3) |"
    ]


def test_a_curve_knows_what_each_point_cost() -> None:
    key = RunKey(level="L0", arm="ours", seed=0, hours=2, agents=8, worlds=4, base="b")
    ppo = replace(result(key, 9.0), curve=([25, 1.0], [100, 2.0]))
    assert curve(ppo) == ([25, 100], [15, 60], [1, 2])
    hours = ({"fleet_pnl": 1.0, "cpu_s": 20.0}, {"fleet_pnl": 2.0, "cpu_s": 40.0})
    assert curve(replace(ppo, curve=hours)) == ([50, 100], [20, 60], [1, 2])
    assert curve(replace(ppo, curve=())) == ([100], [60], [49])


def test_the_interval_of_one_seed_is_over_worlds() -> None:
    key = RunKey(level="L0", arm="ppo", seed=0, hours=1, agents=8, worlds=4, base="b")
    assert "| +9 [+4, +14] |" in table([result(key, 9.0)])[2]


def test_ppo_plays_and_updates_in_whole_plays_and_its_final_play_repeats() -> None:
    worlds = [make_scenario(f"ppo:{number}", STARTER) for number in range(8)]
    runs = list(ppo.train(STARTER, 0, 3 * ppo.ENVS * STARTER.ticks))
    assert [done for done, _ in runs] == [384, 768, 1152]
    trader = runs[-1][1]
    found = ppo.pnl(trader, worlds)
    assert len(found) == 8 and found == ppo.pnl(trader, worlds)
    logprob, entropy = trader.logprob(torch.zeros(2, 25), torch.zeros(2, 2, dtype=torch.long))
    assert (logprob < 0).all() and (entropy > 0).all()


def test_a_run_has_lost_what_it_learned_if_it_ends_far_below_its_best_or_by_failures() -> None:
    def hours(*pnl: float, failed: float = 0.0) -> list[dict[str, float]]:
        return [{"fleet_pnl": one, "failed": failed, "entropy": 0.5, "undone": 1.0} for one in pnl]

    risen = [20.0, *range(30, 330, 10)]
    kept = course(hours(*risen))
    assert not kept.lost and (kept.hours, kept.undone, kept.best) == (31, 31, kept.last)
    assert not course(hours(*risen, *[200.0] * 10)).lost
    assert course(hours(*risen, *[100.0] * 10)).lost
    assert course(hours(20.0, *[-50.0] * 20)).lost
    assert course(hours(*risen, failed=0.2)).lost


def test_a_population_evolves_from_the_gains_of_its_hours() -> None:
    rates, gains = (5e-4, 1e-4, 2e-3), [(0.0, 9.0, 1.0), (4.0, 3.0, 1.0), (9.0, 0.0, 0.0)]
    founders = members(rates, gains[:1], 0)
    assert [one.genes["learning_rate"] for one in founders] == [*rates]
    children = members(rates, gains[:2], 0)
    assert children[0].genes == founders[1].genes  # the best of both hours together
    assert [(one.generation, one.origin) for one in children] == [
        (1, "elite"),
        (1, "mutant"),
        (1, "mutant"),
    ]
    assert members(rates, gains, 0) == children != members(rates, gains[:2], 1)


def test_new_words_are_new_and_hint_at_the_same() -> None:
    for known, new in ((NEWS, NEW_NEWS), (PERP_NEWS, NEW_PERP_NEWS)):
        said = {text for texts in known.values() for text in texts}
        words = set(" ".join(said).split())
        for texts in new.values():
            assert not said & {*texts}  # each line is new, of words that the game knows
            assert set(" ".join(texts).split()) <= words
    world = make_scenario(0, HOUR)
    other = reworded(world)
    assert other == reworded(world) != world
    assert replace(other, news=world.news) == world
    known, tickers = [news for news in world.news if news], {perp.ticker for perp in world.perps}
    for before, after in zip(known, filter(None, other.news), strict=True):
        assert (after.market_id, after.hints) == (before.market_id, before.hints)
        assert (
            after.text in (NEW_PERP_NEWS if after.market_id in tickers else NEW_NEWS)[after.hints]
        )

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random

import numpy as np
import pytest

from babylon.evaluation.arena.match import compare
from babylon.evaluation.arena.play import Decide, Plays, joined, play, replies, scripted
from babylon.evaluation.arena.ruling import Standings, fewer_copies, ruled, unfit, worse_at_worst
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import BATCH, GateWorlds, WorldBatch, simulated
from babylon.game.fleet.fleet_plan import FleetPlan, deal
from babylon.game.market.market import Seat
from babylon.game.market.orders import Decision, Hold, Order, OrderKind, render_decision
from babylon.game.market.prompts import NAMES
from babylon.game.market.scenario import Rules
from babylon.game.market.scripted import SCRIPTED_AGENTS, news_follower, random_trader

WORLDS = unseen_scenarios("arena", "test", 3 * BATCH)
BUY = Order("m1", OrderKind.BUY_YES, 50)


def agent(name: str) -> Decide:
    return scripted(SCRIPTED_AGENTS[name])


def plays(
    pnl: Sequence[float] = (0.0, 0.0),
    *,
    malformed: float = 0.0,
    drawdown: float = 0.0,
    decisions: dict[Decision, int] | None = None,
) -> Plays:
    """Two ticks: profit falls to ``-drawdown`` and ends at ``pnl``."""
    return Plays(
        equity=np.array([[0.0, -drawdown, earned] for earned in pnl]),
        win_rate=np.zeros(len(pnl)),
        malformed=np.full(len(pnl), malformed),
        decisions=Counter(decisions or {BUY: 1, Hold(): 1}),
        start_balance=1000.0,
    )


@pytest.mark.parametrize(
    ("champion", "challenger", "ruling", "scenarios", "reason"),
    [
        ("random", "oracle", "promote", BATCH, "is a gain"),
        ("oracle", "news", "reject", BATCH, "is a loss"),
        ("news", "hold", "reject", BATCH, "collapsed: 100.0% of its decisions are the same"),
        ("news", "news", "insufficient", 2 * BATCH, "the rest could hardly change it"),
    ],
)
async def test_a_match_ends_as_soon_as_it_is_clear(
    champion: str, challenger: str, ruling: str, scenarios: int, reason: str
) -> None:
    heard: list[tuple[int, int]] = []
    match = await compare(
        agent(champion), agent(challenger), simulated(WORLDS), lambda *done: heard.append(done)
    )
    assert (match.ruling, match.looks[-1].scenarios) == (ruling, scenarios)
    assert reason in match.reason
    assert heard == [(look.scenarios, len(WORLDS)) for look in match.looks]
    assert len(match.champion.pnl) == len(match.challenger.pnl) == scenarios


async def test_both_players_are_asked_at_once() -> None:
    """An engine answers one while the other's prompts are written."""
    both = threading.Barrier(2, timeout=60)

    def meeting(seats: Sequence[Seat]) -> Sequence[Decision]:
        both.wait()
        return [Hold() for _ in seats]

    match = await compare(meeting, meeting, simulated(WORLDS[:2]))
    assert match.ruling == "insufficient" and not both.broken


async def test_the_last_batch_may_be_a_part_and_always_rules() -> None:
    """Against a random trader one that believes the news now and then: a gain that takes more."""

    def glancing(seat: Seat, random: Random) -> Decision:
        return (news_follower if random.random() < 0.1 else random_trader)(seat, random)

    match = await compare(
        agent("random"), scripted(glancing, seed=1), simulated(WORLDS[: BATCH + 32])
    )
    assert [look.scenarios for look in match.looks] == [BATCH, BATCH + 32]
    assert match.ruling == "insufficient" and match.reason.endswith("after 160 of 160 scenarios")


@pytest.mark.parametrize(
    ("champion", "challenger", "reason"),
    [
        (plays(malformed=0.01), plays(malformed=0.02), None),
        (
            plays([0.0] * 512, malformed=0.01),
            plays([900.0] * 512, malformed=0.06),
            "malformed replies rose from 1.0% to 6.0%; the limit is 2% more",
        ),
        (plays(drawdown=50), plays(drawdown=149), None),
        (plays(drawdown=50), plays((900, 901), drawdown=500), None),  # risk that pays
        (
            plays(drawdown=50),
            plays((20, 40), drawdown=181),
            "drawdown rose from $50 to $181; the limit is $130 more",
        ),
        (plays(decisions={BUY: 94, Hold(): 6}), plays(decisions={Hold(): 94, BUY: 6}), None),
        (
            plays(decisions={BUY: 94, Hold(): 6}),
            plays((900, 901), decisions={BUY: 96, Hold(): 4}),
            "collapsed: 96.0% of its decisions are the same",
        ),
        (plays(decisions={Hold(): 1}), plays(decisions={Hold(): 1}), None),
    ],
)
def test_a_challenger_with_worse_replies_is_unfit(
    champion: Plays, challenger: Plays, reason: str | None
) -> None:
    told = unfit(champion, challenger, budget=2048)
    assert told is None if reason is None else told is not None and told.startswith(reason)


def test_a_rise_of_malformed_replies_that_may_be_noise_blocks_a_promotion_but_rejects_nobody() -> (
    None
):
    """Two of 64 worlds went wrong: three points more, as chance may do."""
    before, after = plays([0.0] * 64), plays([9.0] * 64)
    after.malformed[:2] = 1.0
    assert unfit(before, after, budget=2048) is None
    assert "malformed replies rose from 0.0% to 3.1%" in (worse_at_worst(before, after) or "")
    after.malformed[:] = 0.0
    assert worse_at_worst(before, after) is None


def test_a_rise_of_malformed_replies_that_is_over_does_not_excuse_a_collapse() -> None:
    before = plays([0.0] * 1025, decisions={BUY: 50, Hold(): 50})
    after = plays([0.0] * 1025, decisions={Hold(): 100})
    after.malformed[:20] = 1.0  # 1.95 %: betting on more than 2 % won before, and stays ahead
    assert "collapsed" in (unfit(before, after, budget=2048) or "")


def test_drawdown_is_the_largest_fall_below_an_earlier_height() -> None:
    curves = np.array([[0.0, 30.0, -20.0, 40.0, 25.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    assert joined([plays()]).drawdown.tolist() == [0.0, 0.0]
    one = Plays(
        equity=curves,
        win_rate=np.zeros(2),
        malformed=np.zeros(2),
        decisions=Counter({BUY: 1}),
        start_balance=1000.0,
    )
    assert one.drawdown.tolist() == [50.0, 0.0]


def test_equity_begins_at_nothing_and_ends_at_the_settled_profit() -> None:
    result = play(agent("oracle"), WORLDS[:4])
    assert result.equity.shape == (4, 7)
    assert np.all(result.equity[:, 0] == 0) and np.all(result.pnl > 0)
    assert np.array_equal(result.pnl, result.equity[:, -1])


def test_batches_of_a_suite_joined_are_the_suite() -> None:
    whole = play(agent("random"), WORLDS[:8])
    parts = joined([play(agent("random"), WORLDS[:3]), play(agent("random"), WORLDS[3:8])])
    assert np.array_equal(whole.equity, parts.equity) and whole.decisions == parts.decisions


def test_malformed_replies_and_equal_decisions_are_counted() -> None:
    def mute(chats: Sequence[object], seeds: Sequence[int]) -> list[str]:
        return ["I would rather not." for _ in chats]

    result = play(replies(mute), WORLDS[:4])
    assert result.malformed.tolist() == [1.0] * 4
    decision, share = result.commonest
    assert isinstance(decision, Hold) and decision.error and share == 1.0


def test_replies_are_drawn_alike_in_a_world_and_tick_whatever_happened_before() -> None:
    """So two policies that think alike act alike, although their balances differ."""
    seen: list[list[int]] = []

    def drawing(amount: int) -> Decide:
        def policy(chats: Sequence[object], seeds: Sequence[int]) -> list[str]:
            seen[-1] += seeds
            return [render_decision(Order("m1", OrderKind.BUY_YES, amount)) for _ in chats]

        return replies(policy, seed=5)

    for amount in (25, 100):
        seen.append([])
        play(drawing(amount), WORLDS[:2])
    assert seen[0] == seen[1] and len(set(seen[0])) == 12


@pytest.mark.parametrize("seats", [1, 3])
async def test_both_sides_meet_a_world_under_the_same_names_of_a_fleet(seats: int) -> None:
    """A small model may fail under a name that no agent of its training had."""
    worlds = simulated(WORLDS[:24], seats=seats)
    met: dict[str, dict[str, list[str]]] = {"champion": {}, "challenger": {}}

    def noting(side: str) -> Decide:
        def decide(asked: Sequence[Seat]) -> Sequence[Decision]:
            for seat in asked:
                met[side][seat.scenario.scenario_id] = [*seat.market.accounts]
            return [Hold() for _ in asked]

        return decide

    await compare(noting("champion"), noting("challenger"), worlds)
    assert met["champion"] == met["challenger"] and len(met["champion"]) == 24
    plan = FleetPlan(start=datetime(2026, 1, 1, tzinfo=UTC), duration_min=6, agents=NAMES)
    fleet = {name for _, names in deal(plan, plan.start, 6, 0) for name in names}
    assert all(
        len(set(names)) == seats and fleet.issuperset(names) for names in met["champion"].values()
    )
    assert len({names[0] for names in met["champion"].values()}) > 12


def test_simulated_gates_promote_what_is_better_and_hardly_anything_else() -> None:
    """Paired differences whose spread is mostly that of a few large ones, as markets have."""
    random = np.random.default_rng(1)

    def promoted(gain: float, gates: int = 100, budget: int = 2048) -> float:
        worlds = simulated(unseen_scenarios("arena", "test", 1) * budget)
        count = 0
        for _ in range(gates):
            noise = random.normal(0, 100, budget) + 200 * random.choice([-1, 0, 1], budget)
            count += _gate(noise + gain, worlds) == "promote"
        return count / gates

    assert promoted(0.0) <= 0.025
    assert promoted(30.0) >= 0.8
    assert promoted(-3.0) <= 0.01


@pytest.mark.parametrize(
    ("pnl", "ruling", "reason"),
    [
        ((60.0, 60.0), "promote", "is a gain"),
        # Worth more on average, but every twentieth world is a ruin.
        ((150.0, -700.0), "reject", "P&L in the worst 5 % of the worlds fell from $0 to $-700"),
    ],
)
def test_a_gain_that_ruins_the_worst_worlds_is_no_promotion(
    pnl: tuple[float, float], ruling: str, reason: str
) -> None:
    worlds = simulated(unseen_scenarios("arena", "test", 1) * 2048)
    usual, worst = pnl
    ended = np.where(np.arange(2048) % 20 == 0, worst, usual)
    standings = Standings(champion=plays(np.zeros(2048)), challenger=plays(ended), crowds={})
    ended_so = ruled(standings, worlds)
    assert ended_so is not None and ended_so[0] == ruling and reason in ended_so[1], ended_so


async def test_a_strategy_that_loses_among_its_copies_is_not_promoted() -> None:
    """Alone, following bad news is far better than trading at random; eight followers lose."""
    rules = Rules(news_reliability=0.55)
    crowded = unseen_scenarios("arena", "crowd", 2 * BATCH, rules)
    alone = await compare(agent("random"), agent("news"), simulated(crowded))
    assert alone.ruling == "promote"
    together = await compare(agent("random"), agent("news"), simulated(crowded[:96], seats=8))
    assert together.ruling != "promote"
    assert fewer_copies(8) == [1, 4] and fewer_copies(2) == [1] and fewer_copies(1) == []


def test_copies_of_a_player_in_one_market_draw_their_own_replies() -> None:
    shared = play(agent("random"), WORLDS[:2], seats=4, copies=4)
    assert len(shared.decisions) > 6  # equal draws would give six decisions, four times each
    assert shared.decisions.total() == 2 * 6 * 4


def test_bets_on_older_worlds_are_smaller() -> None:
    """With equal weights, a loss in old worlds would cancel the same gain in new ones."""
    scenario = unseen_scenarios("arena", "test", 1)[0]
    new = WorldBatch(scenarios=(scenario,) * 64)
    standings = Standings(
        champion=plays(np.zeros(128)),
        challenger=plays(np.repeat([300.0, -300.0], 64)),
        crowds={},
    )
    for weight, promoted in ((0.01, True), (1.0, False)):
        old = WorldBatch(scenarios=(scenario,) * 64, source="recorded", weight=weight)
        worlds = GateWorlds(batches=(new, old))
        ended = ruled(standings, worlds)
        assert ended is not None and (ended[0] == "promote") is promoted, ended


def _gate(differences: np.ndarray, worlds: GateWorlds) -> str:
    budget = len(differences)
    for end in range(BATCH, budget + 1, BATCH):
        half = differences[:end] / 2  # both sides have the same tail
        standings = Standings(champion=plays(-half), challenger=plays(half), crowds={})
        if ended := ruled(standings, worlds):
            return ended[0]
    raise AssertionError("the last look rules")

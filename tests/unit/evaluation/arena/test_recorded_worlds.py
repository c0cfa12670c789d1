"""The world that stands for what the fleet plays."""

from dataclasses import replace

import pytest

from babylon.evaluation.arena.recorded_worlds import _usual
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.game.market.scenario import STARTER, make_scenario


def world(plays: int, *, ticks: int = 10, seats: int = 0) -> RecordedScenario:
    play = RecordedPlay(trajectory_id="t", agent_id="a", replies=(), pnl_usd=0.0)
    return RecordedScenario(
        window_id="w",
        scenario=make_scenario(0, replace(STARTER, ticks=ticks)),
        plays=(play,) * plays,
        players=tuple(f"agent-{seat}" for seat in range(seats)),
    )


def test_a_few_plays_alone_do_not_take_the_gate_out_of_the_shared_markets() -> None:
    alone, shared = world(2), world(8, seats=8)
    assert _usual([alone, shared]) == shared
    assert _usual([alone, alone, shared]) == shared
    assert _usual([world(8), shared]) == shared  # as common: its gate also tests the crowd
    assert _usual([world(9), shared]).players == ()


@pytest.mark.parametrize(
    ("played", "ticks"),
    [
        ([world(24), world(1, ticks=60)], 10),
        ([world(8, ticks=5), world(8), world(8)], 10),
        ([world(8, ticks=5), world(8)], 10),
        ([world(16, ticks=5), world(8)], 10),  # half of the rows of the whole round are lost
        ([world(16, ticks=5), world(7)], 5),
        ([world(30, ticks=5), world(24, ticks=8, seats=8)], 5),  # of its own kind only
    ],
)
def test_one_long_play_does_not_choose_the_length_and_a_round_that_is_cut_short_neither(
    played: list[RecordedScenario], ticks: int
) -> None:
    assert _usual(played).scenario.rules.ticks == ticks

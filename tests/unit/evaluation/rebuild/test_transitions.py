"""Recorded replies become transitions whose rewards add up to the recorded P&L."""

from random import Random

import numpy as np
import pytest

from babylon.core.errors import ReplayError
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.evaluation.rebuild.transitions import transitions_of
from babylon.game.envs.coding import menu
from babylon.game.market.game import make_market
from babylon.game.market.orders import parse_decision, render_decision
from babylon.game.market.scenario import HOUR, STARTER, Rules, make_scenario
from babylon.game.market.scripted import news_follower, random_trader


def recorded(seed: int, rules: Rules, shared: bool) -> RecordedScenario:
    """Two agents, each in a copy of the market or both in one."""
    scenario = make_scenario(seed, rules)
    agents = {"a": news_follower, "b": random_trader}
    plays = []
    for names in [["a", "b"]] if shared else [["a"], ["b"]]:
        market, random = make_market(scenario), Random(seed)
        seats = {name: market.join(name) for name in names}
        replies: dict[str, list[str]] = {name: [] for name in names}
        while not market.over:
            for name in names:
                replies[name].append(render_decision(agents[name](seats[name], random)))
            market.step({name: parse_decision(replies[name][-1]) for name in names})
        market.settle()
        plays += [
            RecordedPlay(
                trajectory_id=name,
                agent_id=name,
                replies=tuple(replies[name]),
                pnl_usd=seats[name].pnl,
            )
            for name in names
        ]
    return RecordedScenario(
        window_id="w",
        scenario=scenario,
        plays=tuple(plays),
        players=("a", "b") if shared else (),
    )


@pytest.mark.parametrize("rules", [STARTER, HOUR], ids=["starter", "hour"])
@pytest.mark.parametrize("shared", [False, True])
def test_payoffs_add_up_to_each_recorded_pnl(rules: Rules, shared: bool) -> None:
    known = [recorded(seed, rules, shared) for seed in range(3)]
    found = transitions_of(known, rules)
    plays = [play for one in known for play in one.plays]
    assert found.rewards.reshape(len(plays), rules.ticks).sum(1) * 100.0 == pytest.approx(
        [play.pnl_usd for play in plays], abs=1e-2
    )
    ends = found.ends.reshape(len(plays), rules.ticks)
    assert (ends[:, -1] == 1).all() and not ends[:, :-1].any()
    inner = np.flatnonzero(found.ends == 0)
    assert (found.following[inner] == found.observations[inner + 1]).all()
    entries = menu(rules.markets, rules.perps)
    for play, codes in zip(plays, found.codes.reshape(len(plays), -1), strict=True):
        held = [render_decision(parse_decision(r)) == '{"action":"hold"}' for r in play.replies]
        assert [entry[0] == 0 for entry in entries[codes]] == held


def test_play_of_another_size_is_left_out_and_none_at_all_is_an_error() -> None:
    other = recorded(0, HOUR, shared=False)
    found = transitions_of([other, recorded(0, STARTER, shared=False)], STARTER)
    assert len(found.codes) == 12
    with pytest.raises(ReplayError, match="3 questions, 0 perps"):
        transitions_of([other], STARTER)

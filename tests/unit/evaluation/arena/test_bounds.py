from random import Random

import pytest

from babylon.evaluation.arena.bounds import most_lost, most_won
from babylon.evaluation.arena.play import play, scripted
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.market import Seat
from babylon.game.market.orders import Decision
from babylon.game.market.scenario import HOUR, STARTER, Rules
from babylon.game.market.scripted import SCRIPTED_AGENTS, buy


def wrong(seat: Seat, random: Random) -> Decision:
    """Stake as much as possible on the wrong side."""
    question = random.choice(seat.scenario.questions)
    return buy(question.market_id, question.outcome.other, min(150.0, seat.balance))


@pytest.mark.parametrize("rules", [STARTER, Rules(ticks=10), Rules(opponents=("random", "random"))])
def test_no_player_leaves_the_bounds(rules: Rules) -> None:
    worlds = unseen_scenarios("arena", "bounds", 64, rules)
    best = play(scripted(SCRIPTED_AGENTS["oracle"]), worlds).pnl.max()
    worst = play(scripted(wrong), worlds).pnl.min()
    assert best <= most_won(rules)
    assert rules.opponents or best > 0.5 * most_won(rules)
    assert -most_lost(rules) <= worst < -0.8 * most_lost(rules)


def test_winnings_beyond_two_start_balances_do_not_count() -> None:
    assert most_won(HOUR) == 2000.0 and most_lost(HOUR) == 1000.0
    assert (most_won(STARTER), most_lost(STARTER)) == (922.5, 900.0)

"""The best of N: its luck on the worlds of the choice does not reach the gate."""

import numpy as np
import pytest

from babylon.evaluation.arena.betting import CERTAIN, Differences, log_wealth
from babylon.evaluation.arena.fitness import best_of, fitness
from tests.unit.evaluation.arena.test_match import plays

ROOM, BUDGET, RUNS = 100.0, 512, 400


@pytest.mark.parametrize("siblings", [4, 8])
def test_the_best_of_equal_siblings_is_promoted_as_rarely_as_any(siblings: int) -> None:
    """No sibling is better than the champion. The chosen one has the best luck of all of them."""
    generator = np.random.default_rng(siblings)

    def drawn(*shape: int) -> np.ndarray:
        return np.clip(generator.normal(0.0, 30.0, shape), -ROOM, ROOM)

    choice = drawn(RUNS, siblings, 128)
    best = choice.mean(-1).argmax(-1)
    lucky = choice[np.arange(RUNS), best].mean(-1)
    assert lucky.mean() > 2.0  # dollars of luck: the winner's curse

    def promoted(values: np.ndarray, budget: int) -> float:
        room = np.full_like(values, ROOM)
        wealth = log_wealth(Differences(values, room, room), budget)
        return float((wealth.max(-1) >= CERTAIN).mean())

    at_the_gate = promoted(drawn(RUNS, BUDGET), BUDGET)
    assert at_the_gate <= 0.05
    # what a gate on the worlds of the choice would do
    on_the_same = promoted(choice[np.arange(RUNS), best], 128)
    assert on_the_same > at_the_gate


def test_the_fittest_has_the_highest_mean_and_the_first_wins_a_tie() -> None:
    assert best_of([1.0, None, 3.0, 3.0]) == 2
    assert best_of([None, None]) == 0


def test_fitness_is_a_paired_difference() -> None:
    parent, own = plays([1.0, 2.0, 3.0]), plays([2.0, 2.0, 5.0])
    found = fitness(parent, own)
    assert (found.mean, found.worlds) == (1.0, 3)
    assert found.error == pytest.approx(1 / 3**0.5)


def test_a_sibling_whose_replies_the_gate_would_refuse_is_unfit() -> None:
    parent = plays([1.0, 2.0], malformed=0.01)
    assert fitness(parent, plays([9.0, 9.0], malformed=0.03)).unfit is None
    found = fitness(parent, plays([9.0, 9.0], malformed=0.04))
    assert found.mean == 7.5 and "malformed replies rose from 1.0% to 4.0%" in (found.unfit or "")

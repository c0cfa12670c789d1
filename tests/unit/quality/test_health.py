"""Alarms about a window's data: rare in sound data of any shape, certain when it breaks."""

import math
import random
from collections.abc import Callable

import pytest

from babylon.quality.health import HISTORY, LEAST_HISTORY, PlayTally, find_alarms
from babylon.store.window_health import Figures

WINDOWS = 2000
Draw = Callable[[random.Random, int], Figures]


def binomial(rng: random.Random, n: int, p: float) -> float:
    return sum(rng.random() < p for _ in range(n)) / n


def quiet(rng: random.Random, hour: int) -> Figures:
    """A fleet of forty that plays around the clock; a few rows are bad."""
    return {
        "trajectories": 40,
        "agents": 40 - rng.randrange(3),
        "rejected_share": binomial(rng, 40, 0.03),
        "calls_without_tokens_share": binomial(rng, 40, 0.01),
        "outcomes": 12,
        "pnl_median_usd": rng.gauss(2, 5),
        "pnl_extreme_usd": abs(rng.gauss(120, 30)),
    }


def skewed(rng: random.Random, hour: int) -> Figures:
    """Log-normal profits, a daily rhythm of agents, some nights without outcomes."""
    awake = 20 + 15 * math.sin(hour * math.tau / 24)
    agents = max(1, round(awake + rng.gauss(0, 3)))
    return {
        "trajectories": agents,
        "agents": agents,
        "rejected_share": binomial(rng, agents, 0.15),
        "calls_without_tokens_share": binomial(rng, agents, 0.5),
        "outcomes": rng.choice([0, 5, 8, 20]),
        "pnl_median_usd": math.exp(rng.gauss(1, 1)) - 3,
        "pnl_extreme_usd": math.exp(rng.gauss(5, 0.7)),
    }


def few(rng: random.Random, hour: int) -> Figures:
    """Three agents, whose shares can only be thirds."""
    return {
        "trajectories": 3,
        "agents": 3,
        "rejected_share": binomial(rng, 3, 0.1),
        "outcomes": 1,
        "pnl_median_usd": rng.choice([0.0, 0.0, 0.4, -0.3]),
        "pnl_extreme_usd": rng.choice([0.5, 1.0, 2.0]),
    }


@pytest.mark.parametrize(("draw", "most"), [(quiet, 0.0005), (few, 0.0005), (skewed, 0.01)])
def test_sound_data_of_any_shape_raises_few_alarms(draw: Draw, most: float) -> None:
    rng = random.Random(1)
    last: list[Figures] = []
    alarmed = 0
    for hour in range(WINDOWS):
        now = draw(rng, hour)
        alarmed += bool(find_alarms(now, last[-HISTORY:]))
        last.append(now)
    assert alarmed / WINDOWS <= most


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        ("rejected_share", 0.5, "share of rejected trajectories: 0.5; in the last 168 windows 0.0"),
        ("agents", 15, "agents that played: 15; in the last 168 windows 39, mostly 38 to 40"),
        ("calls_without_tokens_share", 1.0, "share of calls without tokens: 1;"),
        ("outcomes", 0, "market outcomes: 0; in the last 168 windows 12, mostly 12 to 12"),
        ("pnl_median_usd", 80.0, "median P&L in USD: 80;"),
        ("pnl_median_usd", -80.0, "median P&L in USD: -80;"),
        ("pnl_extreme_usd", 10_000.0, "largest gain or loss in USD: 1e+04;"),
    ],
)
def test_what_breaks_is_named_with_its_usual_range(figure: str, value: float, said: str) -> None:
    rng = random.Random(2)
    last = [quiet(rng, hour) for hour in range(HISTORY)]
    (alarm,) = find_alarms({**quiet(rng, 0), figure: value}, last)
    assert alarm.figure == figure and alarm.reason.startswith(said)


def test_agents_and_outcomes_that_vanish_are_named_even_if_they_vary() -> None:
    rng = random.Random(3)
    last = [{**quiet(rng, 0), "agents": rng.choice([5, 40, 90])} for _ in range(HISTORY)]
    alarms = find_alarms({"trajectories": 0, "agents": 0, "outcomes": 12}, last)
    assert [alarm.figure for alarm in alarms] == ["agents"]


def test_the_first_small_change_after_equal_windows_is_no_alarm() -> None:
    figures = {"trajectories": 40, "agents": 10, "rejected_share": 0, "pnl_median_usd": 0.0}
    changes = {"agents": 9, "rejected_share": 2 / 40, "pnl_median_usd": 3.0}
    assert not find_alarms({**figures, **changes}, [figures] * HISTORY)


def test_few_windows_raise_no_alarm_and_a_lasting_change_ends() -> None:
    rng = random.Random(4)
    last = [quiet(rng, hour) for hour in range(LEAST_HISTORY)]
    broken = {**quiet(rng, 0), "rejected_share": 0.6}
    assert not find_alarms(broken, last[1:])
    assert find_alarms(broken, last)
    week = [quiet(rng, hour) for hour in range(HISTORY)]
    alarmed = [bool(find_alarms(broken, [*week, *[broken] * n][-HISTORY:])) for n in range(20)]
    assert alarmed == [True] * sum(alarmed) + [False] * (20 - sum(alarmed))
    assert 8 <= sum(alarmed) <= 10


def test_a_window_without_rows_has_no_shares() -> None:
    assert PlayTally().figures(0) == {"trajectories": 0, "agents": 0, "outcomes": 0}

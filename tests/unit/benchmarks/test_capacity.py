"""The plan of ``benchmarks.capacity``."""

import pytest

from benchmarks.capacity import (
    ASSUMED,
    LONG,
    SHORT,
    Fleet,
    first_to_break,
    line,
    plan,
    predicted,
)


def test_load_grows_with_the_fleet_except_the_gate() -> None:
    small, large = (
        {part.name: part.needed for part in plan(Fleet(agents=agents), ASSUMED)}
        for agents in (10_000, 20_000)
    )
    assert small.pop("gate") == large.pop("gate") == 1
    for name, needed in small.items():
        assert large[name] == pytest.approx(2 * needed), name


def test_the_most_overloaded_part_comes_first_and_all_hold_a_small_fleet() -> None:
    assert not any(part.broken for part in plan(Fleet(agents=100), ASSUMED))
    parts = plan(Fleet(agents=1_000_000), ASSUMED)
    shares = [part.needed / part.bound for part in parts]
    assert shares == sorted(shares, reverse=True) and parts[0].broken


def test_a_line_goes_through_both_measured_costs() -> None:
    base, slope = line(1.0, 7.0)
    assert base + slope * SHORT == pytest.approx(1.0)
    assert base + slope * LONG == pytest.approx(7.0)
    assert line(1.0, 100.0)[0] == 0, "no call costs less than nothing"
    spent = predicted(ASSUMED, {SHORT: 10})
    assert spent.gateway == pytest.approx(
        10 * (ASSUMED.gateway_s + SHORT * ASSUMED.gateway_token_s)
    )


def test_thinning_bounds_what_is_trained() -> None:
    fleet = Fleet(agents=10_000, trajectories=1_000, thinned=0.3)
    assert fleet.trained == 7_000, "a third may be left out, however large the window is"
    assert Fleet(agents=10_000, trajectories=1_000, thinned=0.9).trained == 1_000


def test_the_first_part_to_break_does_not_depend_on_the_fleet_that_is_planned() -> None:
    found = {first_to_break(Fleet(agents=agents), ASSUMED)[1] for agents in (1, 700, 10_000)}
    (agents,) = found
    assert not plan(Fleet(agents=agents - 1), ASSUMED)[0].broken
    assert plan(Fleet(agents=agents), ASSUMED)[0].broken

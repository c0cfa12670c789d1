"""Checkpoints that stay: a decision without disk or database."""

from dataclasses import replace

from babylon.stages.in_use import kept
from babylon.store.checkpoints_in_use import Held, Holdings


def held(version: int, parent: int | None, pnl: float | None = None) -> Held:
    return Held(
        policy_version=version,
        parent_version=parent,
        kind="base" if parent is None else "lora",
        uri=f"/checkpoints/{version}",
        pnl=pnl,
        removed=False,
    )


LINE = (held(0, None), *(held(version, version - 1) for version in range(1, 10)))
SERVED = Holdings(policies=LINE, routed=tuple(range(10)), in_use=frozenset())


def keeps(holdings: Holdings, **changes: object) -> set[int]:
    options = {"bases": {}, "number": 1} | changes
    return set(kept(holdings, **options))  # type: ignore[arg-type]


def test_the_base_the_champion_and_the_one_to_roll_back_to_stay() -> None:
    assert keeps(SERVED) == {0, 8, 9}


def test_as_many_stay_to_roll_back_to_as_the_number_says() -> None:
    assert keeps(SERVED, number=3) == {0, 6, 7, 8, 9}


def test_after_a_rollback_the_one_before_can_still_be_reached() -> None:
    assert keeps(replace(SERVED, routed=(0, 1, 4, 9, 4))) == {0, 1, 4, 9}


def test_the_newest_stay_though_they_were_rejected() -> None:
    assert keeps(replace(SERVED, routed=(0, 1, 2)), number=2) == {0, 1, 2, 8, 9}


def test_the_best_by_their_verdict_stay() -> None:
    judged = (*LINE[:3], held(3, 2, 500.0), held(4, 3, -1.0), *LINE[5:])
    assert keeps(replace(SERVED, policies=judged)) == {0, 3, 8, 9}


def test_what_a_window_at_work_refers_to_stays() -> None:
    assert keeps(replace(SERVED, in_use=frozenset({2, 5}))) == {0, 2, 5, 8, 9}


def test_a_base_stays_as_long_as_one_of_its_adapters() -> None:
    assert keeps(SERVED, bases={9: "/checkpoints/3", 5: "/checkpoints/2"}) == {0, 3, 8, 9}


def test_a_removed_policy_takes_nobodys_place() -> None:
    gone = tuple(replace(one, removed=one.policy_version in (8, 9)) for one in LINE)
    assert keeps(replace(SERVED, policies=gone, routed=(0, 1))) == {0, 1, 7}


def test_before_anything_served_the_base_stays() -> None:
    assert keeps(replace(SERVED, policies=LINE[:1], routed=())) == {0}


def test_policies_that_may_never_serve_take_no_place() -> None:
    """Policy 3 was rolled back and released; 4 descends from it, 5 and 6 from policy 2."""
    line = (
        *LINE[:3],
        replace(held(3, 2, pnl=90.0), released=True),
        held(4, 3, pnl=80.0),
        held(5, 2, pnl=10.0),
        held(6, 2),
    )
    found = replace(SERVED, policies=line, routed=(0, 1, 2, 3, 2))
    assert keeps(found) == {0, 1, 2, 5, 6}

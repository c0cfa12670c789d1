"""The policies that a gateway holds, and the route that it serves with them."""

from datetime import UTC, datetime

import pytest

from babylon.serving.gateway.route_table import ArmSplit, ServingRoute, Target, next_route, wanted
from babylon.store import routes
from babylon.store.desired import Desired

TARGETS = {v: Target(f"babylon-v{v}", v, f"/{v}") for v in range(10)}


def desired(
    *history: int, challenger: int | None = None, proposals: dict[int, int] | None = None
) -> Desired:
    """The route is the last of ``history``; a challenger answers a quarter of the agents."""
    compared = {"mode": "canary", "challenger_version": challenger, "share": 0.25, "salt": "s"}
    route = routes.Route(
        route_version=len(history),
        policy_version=history[-1],
        author="test",
        reason="test",
        created_at=datetime(2025, 11, 14, tzinfo=UTC),
        **(compared if challenger is not None else {}),  # type: ignore[arg-type]
    )
    previous = next((version for version in reversed(history) if version != history[-1]), None)
    return Desired(route=route, previous=previous, proposals=proposals or {})


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (desired(0), {0: None}),
        (desired(0, 1, 2), {2: None, 1: "route 3"}),
        (desired(0, 1, 2, 1), {1: None, 2: "route 4"}),
        (desired(0, 1, 1, challenger=2), {1: None, 2: None, 0: "route 3"}),
        (desired(0, 1, 1, 2), {2: None, 1: "route 4"}),  # the challenger was promoted
        (desired(0, proposals={3: 7, 2: 9}), {0: None, 3: "proposal 7", 2: "proposal 9"}),
        (desired(0, 1, proposals={0: 7, 1: 8}), {1: None, 0: "proposal 7"}),
    ],
)
def test_what_serves_comes_before_what_is_proposed_and_that_before_the_way_back(
    what: Desired, expected: dict[int, str | None]
) -> None:
    assert list(wanted(what).items()) == list(expected.items())


def loaded(*versions: int) -> dict[int, Target]:
    return {version: TARGETS[version] for version in versions}


def test_the_newest_route_is_served_as_soon_as_both_arms_are_loaded() -> None:
    before = ServingRoute(2, "babylon", TARGETS[0])
    newest = desired(0, 1, 1, challenger=2)
    for lacking in (loaded(0), loaded(0, 1), loaded(0, 2)):
        kept = next_route("babylon", newest, lacking, before)
        assert kept is not None and (kept.route_version, kept.arms) == (2, (TARGETS[0],))
    expected = ServingRoute(
        3, "babylon", TARGETS[1], ArmSplit(TARGETS[2], 0.25, "s"), others=(TARGETS[0],)
    )
    assert next_route("babylon", newest, loaded(0, 1, 2), before) == expected


def test_what_is_proposed_answers_by_its_name_alone() -> None:
    route = next_route("babylon", desired(0, proposals={1: 5}), loaded(0, 1), None)
    assert route is not None
    assert route.assign("babylon", "agent").target == TARGETS[0]
    assert route.assign("babylon-v1", "agent").target == TARGETS[1]


def test_without_the_policies_of_any_route_nothing_is_served() -> None:
    assert next_route("babylon", desired(0, 1), loaded(0), None) is None


def test_what_is_wanted_no_more_is_not_answered_by_though_it_is_still_loaded() -> None:
    route = next_route("babylon", desired(0, 1, 2), loaded(0, 1, 2), None)
    assert route is not None and route.targets.keys() == {"babylon", "babylon-v2", "babylon-v1"}

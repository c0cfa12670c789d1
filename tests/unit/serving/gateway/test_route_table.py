"""Routes, the policies that they need, and the calls that they answer."""

import string
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.core.types import Arm
from babylon.serving.gateway.readiness import Event
from babylon.serving.gateway.route_table import (
    ArmSplit,
    Assignment,
    RouteTable,
    ServingRoute,
    Target,
    next_route,
    wanted,
)
from babylon.serving.openai_wire import RequestError
from babylon.store import routes
from babylon.store.gateways import Desired

V0, V1, V2, V3 = (Target(f"babylon-v{version}", version, f"/{version}") for version in range(4))
KEYS = st.text(string.printable, min_size=1, max_size=40)
SHARES = st.floats(0, 1, exclude_min=True, exclude_max=True)


def serving(route: ServingRoute) -> RouteTable:
    table = RouteTable()
    table.route = route
    table.readiness.note(Event.LOADED)
    return table


def compared(share: float, salt: str = "experiment") -> ServingRoute:
    return ServingRoute(2, "babylon", V1, ArmSplit(V2, share, salt), (V0,))


def test_request_keeps_its_policy_over_a_swap() -> None:
    table = serving(ServingRoute(1, "babylon", V0))
    with table.take("babylon", "agent") as taken:
        table.route = ServingRoute(2, "babylon", V1, others=(V0,))
        assert (taken.route.route_version, taken.target) == (1, V0)
        with table.take("babylon", "agent") as later:
            assert later.target == V1
            assert table.in_flight == {0: 1, 1: 1}
    assert not table.in_flight


def test_failed_request_is_no_longer_in_flight_and_the_last_one_of_a_version_is_told() -> None:
    table, idle = serving(ServingRoute(1, "babylon", V0)), list[int]()
    table.idle = idle.append
    with table.take("babylon", "agent"):
        with pytest.raises(RuntimeError), table.take("babylon", "agent"):
            raise RuntimeError
        assert table.in_flight == {0: 1} and not idle
    assert not table.in_flight and set(idle) == {0}


def test_calls_for_a_version_by_its_name_use_it_but_no_route_sent_them() -> None:
    table, idle = serving(ServingRoute(1, "babylon", V0)), list[int]()
    table.idle = idle.append
    with table.take("babylon-v0", "agent"):
        with table.take("babylon", "agent"):
            assert (table.in_flight, table.routed) == ({0: 2}, {0: 1})
        assert (table.in_flight, table.routed, idle) == ({0: 1}, {}, [0])
    assert not table.in_flight


def test_a_version_asked_for_by_name_is_outside_of_any_comparison() -> None:
    route = ServingRoute(2, "babylon", V1, others=(V0,))
    assert route.assign("babylon", "agent") == Assignment(route, "champion", V1)
    assert route.assign("babylon-v1", "agent") == Assignment(route, "pinned", V1)
    assert route.assign("babylon-v0", "agent") == Assignment(route, "pinned", V0)
    assert compared(0.5).assign("babylon-v2", "agent", "champion").arm == "pinned"


def test_unknown_model_is_not_found_and_the_known_ones_are_named() -> None:
    table = serving(compared(0.5))
    names = r"'gpt' .* babylon, babylon-v1, babylon-v2, babylon-v0"
    with pytest.raises(RequestError, match=names) as caught, table.take("gpt", "agent"):
        pass
    assert caught.value.status == 404


def test_nothing_is_served_before_the_first_route() -> None:
    with (
        pytest.raises(RequestError, match="the gateway is starting") as caught,
        RouteTable().take("babylon", "agent"),
    ):
        pass
    assert caught.value.status == 503


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_the_challenger_answers_its_share_of_many_agents(share: float) -> None:
    """Of 20,000 agents, within four standard deviations."""
    route, agents = compared(share), 20_000
    mine = sum(route.assign("babylon", f"agent-{n}").arm == "challenger" for n in range(agents))
    assert abs(mine - share * agents) < 4 * (agents * share * (1 - share)) ** 0.5


def test_two_experiments_choose_agents_independently_of_each_other() -> None:
    agents = [f"agent-{n}" for n in range(10_000)]
    one, other = (
        {a for a in agents if compared(0.5, salt).assign("babylon", a).arm == "challenger"}
        for salt in ("one", "other")
    )
    assert abs(len(one & other) - 2_500) < 4 * (10_000 * 0.25 * 0.75) ** 0.5


@given(key=KEYS, shares=st.tuples(SHARES, SHARES))
def test_a_ramp_moves_agents_one_way_only(key: str, shares: tuple[float, float]) -> None:
    smaller, greater = (compared(share).assign("babylon", key) for share in sorted(shares))
    assert smaller == compared(min(shares)).assign("babylon", key)  # and always the same way
    assert smaller.arm != "challenger" or greater.arm == "challenger"
    assert (smaller.target == V2) == (smaller.arm == "challenger")


@given(key=KEYS, share=SHARES, pin=st.sampled_from(["champion", "challenger"]))
def test_a_trajectory_that_has_an_arm_keeps_it(key: str, share: float, pin: Arm) -> None:
    assert compared(share).assign("babylon", key, pin).arm == pin
    assert (
        ServingRoute(3, "babylon", V1).assign("babylon", key, pin).arm == "champion"
    )  # it is over


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

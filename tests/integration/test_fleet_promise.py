"""The fleet's own play against the policy before, and the return to it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from babylon.core.errors import (
    ArtifactError,
    BabylonError,
    ModelError,
    ServingError,
    WindowNotReadyError,
)
from babylon.core.settings import Settings
from babylon.core.trajectories import Call, Trajectory
from babylon.core.types import Artifact, Claim, Rejection, Scored
from babylon.core.windows import WindowState, parse_window_id
from babylon.deployment import keep_promise
from babylon.evaluation.arena.betting import Differences, Floats, log_wealth
from babylon.evaluation.arena.fleet_promise import broken_promise, own_worlds, pairs_of
from babylon.evaluation.arena.play import Decide, scripted
from babylon.evaluation.arena.players import Player
from babylon.evaluation.rebuild.recorded_windows import played_rows, rebuild_rows
from babylon.game.market.scenario import STARTER
from babylon.game.market.scripted import contrarian, news_follower
from babylon.quality.decode import Reason
from babylon.stages.deploy import deploy_checkpoint
from babylon.store import Store
from babylon.store.calls import insert_calls
from babylon.store.fleet_pairs import FleetPair, add_pairs
from babylon.store.late import store_collected
from babylon.store.rejections import replace_rejections
from babylon.store.routes import commit_route, current_route
from babylon.store.windows import claim_window, set_state
from babylon.tasks import promise as tasks_promise
from babylon.tasks.promise import promise_kept
from babylon.tasks.stage import stage
from tests.deployments import announced, outcomes, serving, three_policies, verdict
from tests.integration.test_gate_worlds import played
from tests.trajectories import a_trajectory
from tests.unit.serving.gateway.calls import CALL

CHAMPION = 2


@pytest.fixture
async def claim(store: Store) -> Claim:
    return await three_policies(store)


def pairs(differences: Sequence[float]) -> list[FleetPair]:
    return [
        FleetPair(scenario_id=f"w{n}", fleet_usd=100.0 + d, before_usd=100.0, room_usd=2000.0)
        for n, d in enumerate(differences)
    ]


async def put_in_force(store: Store, version: int) -> None:
    await commit_route(
        store,
        policy_version=version,
        author="a person",
        reason="the market turned",
        expected_route_version=(await current_route(store)).route_version,
    )


def by(policy: int, name: str) -> Trajectory:
    call = Call(step=0, messages=(), response="", policy_version=policy)
    own = parse_window_id("2025-11-14T08:00")
    return a_trajectory(name, window_id=own.id, start=own.start, end=own.end, calls=(call,))


async def test_worlds_that_the_champion_played_are_played_by_the_policy_before(
    store: Store, settings: Settings
) -> None:
    window = parse_window_id(await played(store, settings, 8, STARTER))
    rows = await played_rows(store, window, apart_from=(), most=64)
    worlds = rebuild_rows(rows).scenarios
    names = [play.trajectory_id for world in worlds for play in world.plays]
    all_its_own: dict[str, set[int | None]] = {name: {CHAMPION} for name in names}
    assert own_worlds(worlds, all_its_own, CHAMPION) == list(worlds)
    good = pairs_of(worlds, scripted(news_follower))
    bad = pairs_of(worlds, scripted(contrarian))
    assert [pair.scenario_id for pair in good] == [world.scenario.scenario_id for world in worlds]
    for pair, world in zip(good, worlds, strict=True):
        earned = [play.pnl_usd for play in world.plays]
        assert pair.fleet_usd == pytest.approx(sum(earned) / len(earned))
    assert sum(p.before_usd for p in good) > sum(p.before_usd for p in bad)
    mixed = all_its_own | {names[0]: {1, CHAMPION}}
    assert len(own_worlds(worlds, mixed, CHAMPION)) == len(worlds) - 1
    assert own_worlds(worlds, {}, CHAMPION) == []


@pytest.mark.parametrize(
    ("reason", "counted"),
    [(Reason.NO_RESPONSE, 2), (Reason.BELOW_REWARD_THRESHOLD, 2), (Reason.STEP_ORDER, 1)],
)
async def test_play_that_was_left_out_or_refused_as_poor_is_evidence_too(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, reason: Reason, counted: int
) -> None:
    """A world counts only if the policy of all of its plays is known."""
    window = parse_window_id(await played(store, settings, 8, STARTER))
    worlds = rebuild_rows(await played_rows(store, window, apart_from=(), most=64)).scenarios
    names = [play.trajectory_id for world in worlds for play in world.plays]
    claim = await claim_window(store, window, owner="worker", lease_s=60)
    kept, held = (
        Artifact(uri=uri, sha256="", rows=8, window_id=window.id) for uri in ("kept", "held out")
    )
    refused, *names = names
    await replace_rejections(
        store, claim, [Rejection(trajectory_id=refused, reason=reason, detail="")]
    )
    await insert_calls(store, [replace(CALL, trajectory_id=refused, policy_version=CHAMPION)])
    parts = {"kept": names[::2], "held out": names[1::2]}
    scored = Scored(
        claim=claim,
        artifact=kept,
        held_out=held,
        eligible=16,
        agents=16,
        scorer="heuristic",
        avg_reward=0.0,
    )
    await set_state(store, claim, WindowState.FAILED, scored=scored)

    def read(_: object, artifact: Artifact) -> list[Trajectory]:
        return [by(CHAMPION, name) for name in parts[artifact.uri]]

    @asynccontextmanager
    async def entered(*_: object) -> AsyncIterator[list[Decide]]:
        yield [scripted(news_follower)]

    monkeypatch.setattr(keep_promise, "read_trajectories", read)
    monkeypatch.setattr(keep_promise, "entered", entered)
    rival = Player(name="before", enter=lambda: scripted(news_follower))
    (found,) = await keep_promise._pairs(store, 0, claim, CHAMPION, {1: rival}, "babylon")
    assert (len(found), len(worlds)) == (counted, 2)


@pytest.mark.parametrize(
    ("fine", "error"), [(0, ModelError("it is damaged")), (2, ArtifactError("it is not in store"))]
)
async def test_a_window_that_was_never_scored_is_evidence_with_all_its_play(
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    fine: int,
    error: BabylonError,
) -> None:
    """A collapsed policy plays nothing that counts. Without the accepted plays of a small window
    the worlds that were played badly would be the only evidence."""
    await three_policies(store)
    window = parse_window_id(await played(store, settings, 8, STARTER))
    worlds = rebuild_rows(await played_rows(store, window, apart_from=(), most=64)).scenarios
    names = [play.trajectory_id for world in worlds for play in world.plays]
    claim = await claim_window(store, window, owner="worker", lease_s=60)
    await store_collected(store, claim, pl.Series(names))
    reasons = [Reason.NO_RESPONSE] * (len(names) - fine) + [None] * fine
    refused = [
        Rejection(trajectory_id=name, reason=reason, detail="")
        for name, reason in zip(names, reasons, strict=True)
        if reason
    ]
    await replace_rejections(store, claim, refused)
    calls = [replace(CALL, call_id=n, trajectory_id=n, policy_version=CHAMPION) for n in (names)]
    await insert_calls(store, calls)

    @asynccontextmanager
    async def entered(*about: object) -> AsyncIterator[list[Decide]]:
        if about[-1] == [lost]:
            raise error
        yield [scripted(news_follower)]

    monkeypatch.setattr(keep_promise, "entered", entered)
    lost, rival = (
        Player(name=name, enter=lambda: scripted(contrarian)) for name in ("lost", "base")
    )
    rivals = {1: lost, 0: rival}
    none, found = await keep_promise._pairs(store, 0, claim, CHAMPION, rivals, "babylon")
    assert (len(none), len(found)) == (0, 2)  # the one that does not load costs only itself
    await add_pairs(store, claim, CHAMPION, 0, found[:1])
    none, found = await keep_promise._pairs(store, 0, claim, CHAMPION, rivals, "babylon")
    assert len(found) == 1  # what is known is not played again


@pytest.mark.parametrize("error", [WindowNotReadyError("all scores are equal"), ServingError("x")])
async def test_a_window_that_teaches_nothing_asks_the_fleet(
    store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch, error: BabylonError
) -> None:
    asked = []

    async def promise(_: Store, seed: int, model: str, claim: Claim) -> None:
        asked.append(claim.window_id)
        raise ServingError("the engine is away")  # is logged

    monkeypatch.setattr(tasks_promise, "promise", stage("promise")(promise).with_options(retries=0))
    with pytest.raises(type(error), match=str(error)):
        async with promise_kept(store, 0, "babylon", claim):
            raise error
    assert asked == [claim.window_id] * isinstance(error, WindowNotReadyError)


def test_only_a_sure_loss_breaks_the_promise() -> None:
    assert broken_promise([]) is None
    assert broken_promise([pairs([-150.0, 150.0] * 60)]) is None
    assert broken_promise([pairs([40.0, 60.0] * 60)]) is None
    lost = broken_promise([pairs([-220.0, -180.0] * 60)])
    assert lost is not None and lost.mean == pytest.approx(-200) and lost.high < 0


def test_good_months_do_not_hide_a_market_that_turned() -> None:
    good, bad = pairs([450.0, 550.0] * 4), pairs([-650.0, -750.0] * 4)
    windows = [good] * 200
    assert broken_promise(windows, 2) is None
    found = [broken_promise([*windows, *[bad] * count], 2) for count in (1, 8)]
    assert found[0] is None  # eight worlds are too few
    assert found[1] is not None and found[1].mean == pytest.approx(-700)


def test_a_champion_of_a_year_is_weighed_by_its_last_month(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def counted(differences: Differences, budget: int) -> Floats:
        asked.append(len(differences.values))
        return log_wealth(differences, budget)

    monkeypatch.setattr("babylon.evaluation.arena.fleet_promise.log_wealth", counted)
    good, bad = pairs([450.0, 550.0]), pairs([-650.0, -750.0] * 4)
    assert broken_promise([good] * 8760) is None
    assert len(asked) == 720 and max(asked) == 1440
    found = broken_promise([*[good] * 8760, *[bad] * 12])
    assert found is not None and found.mean == pytest.approx(-700)


def test_a_champion_as_good_as_its_rival_is_rarely_taken_back_in_a_hundred_windows() -> None:
    """Plays lose much rarely, and most often earn a little: the mean difference is zero."""
    random = np.random.default_rng(0)
    taken = 0
    for _ in range(100):
        differences = np.where(random.random((100, 8)) < 0.02, -490.0, 10.0)
        windows = [pairs(window) for window in differences.tolist()]
        taken += any(broken_promise(windows[:n]) for n in (2, 5, 10, 20, 50, 75, 100))
    assert taken <= 6  # 2.5 are allowed on average


async def test_the_policy_before_returns_once_the_fleet_surely_loses(
    store: Store, settings: Settings, claim: Claim
) -> None:
    await deploy_checkpoint(store, settings, verdict(claim))
    assert await serving(store) == CHAMPION
    rejected = replace(verdict(claim, promote=False), policy_version=1)
    await add_pairs(store, claim, CHAMPION, 0, pairs([-20.0, 30.0] * 60))
    kept = await deploy_checkpoint(store, settings, rejected)
    assert await serving(store) == CHAMPION and kept.changes == ()
    other = [replace(p, scenario_id=f"later-{p.scenario_id}") for p in pairs([-400.0] * 120)]
    again = await add_pairs(store, claim, CHAMPION, 0, other)
    assert [len(window) for window in again] == [240]
    assert again == await add_pairs(store, claim, CHAMPION, 0, other)
    back = await deploy_checkpoint(store, settings, rejected)
    assert (await serving(store), back.policy_version, len(back.changes)) == (0, 0, 1)
    assert "a loss, although the gate saw a gain" in back.reason
    assert "the fleet earned -" in (await current_route(store)).reason
    assert (await deploy_checkpoint(store, settings, rejected)).changes == ()  # no further back


async def test_a_champion_that_comes_back_is_not_taken_back_for_what_it_lost_before(
    store: Store, settings: Settings, claim: Claim
) -> None:
    await deploy_checkpoint(store, settings, verdict(claim))
    await add_pairs(store, claim, CHAMPION, 0, pairs([-400.0] * 120))
    rejected = replace(verdict(claim, promote=False), policy_version=1)
    await deploy_checkpoint(store, settings, rejected)
    assert await serving(store) == 0
    await put_in_force(store, CHAMPION)
    later = await claim_window(
        store, parse_window_id("2025-11-14T11:00"), owner="worker", lease_s=60
    )
    rejected = replace(rejected, claim=later)
    assert (await deploy_checkpoint(store, settings, rejected)).changes == ()
    assert await serving(store) == CHAMPION
    await add_pairs(store, later, CHAMPION, 0, pairs([-400.0] * 120))
    await deploy_checkpoint(store, settings, rejected)
    assert await serving(store) == 0  # what it loses since then counts


async def test_a_recipe_over_the_same_play_is_no_further_evidence(
    store: Store, claim: Claim
) -> None:
    """It trains on what the window released or did not use, and the worlds are the same."""
    once = await add_pairs(store, claim, CHAMPION, 0, pairs([-20.0, -30.0]))
    window = replace(parse_window_id(claim.window_id), recipe="again")
    again = await claim_window(store, window, owner="second", lease_s=60)
    assert await add_pairs(store, again, CHAMPION, 0, pairs([-20.0, -30.0])) == once
    more = await add_pairs(store, again, CHAMPION, 0, pairs([-20.0, -30.0, -40.0]))
    assert [len(one) for one in more] == [2, 1]
    assert await add_pairs(store, again, CHAMPION, 1, pairs([-20.0])) == [pairs([-20.0])]


async def test_a_policy_that_gateways_have_unloaded_returns_too(
    store: Store, settings: Settings, claim: Claim
) -> None:
    """It is no candidate: its parent, if it has one, served long ago."""
    await deploy_checkpoint(store, settings, verdict(claim))
    await add_pairs(store, claim, CHAMPION, 0, pairs([-400.0] * 120))
    rejected = replace(verdict(claim, promote=False), policy_version=1)
    async with announced(store):
        back = await deploy_checkpoint(store, settings, rejected)
    assert (await serving(store), back.policy_version, len(back.changes)) == (0, 0, 1)
    assert await outcomes(store) == ["committed"] * 2  # it was loaded again


async def test_a_better_policy_that_no_gateway_loads_holds_up_no_promoted_checkpoint(
    store: Store, settings: Settings, claim: Claim
) -> None:
    await deploy_checkpoint(store, settings, replace(verdict(claim), policy_version=1))
    await store.pool.execute(
        "UPDATE babylon.policies SET parent_version = 1 WHERE policy_version = 2"
    )
    await add_pairs(store, claim, 1, 0, pairs([-700.0] * 60))
    own = verdict(claim, route_version=2)
    async with announced(store, refuses={0: "no such file"}):
        with pytest.raises(ServingError, match="cannot hold policy 0"):  # somebody must know
            await deploy_checkpoint(store, settings, replace(own, promote=False))
        deployed = await deploy_checkpoint(store, settings, own)
    assert "policy 2 is refused" in deployed.reason  # by its checks: it was sent out


async def test_a_policy_that_never_serves_again_is_no_rival(
    store: Store, settings: Settings, claim: Claim
) -> None:
    await deploy_checkpoint(store, settings, replace(verdict(claim), policy_version=1))
    await store.pool.execute(
        "UPDATE babylon.policies SET parent_version = 1 WHERE policy_version = 2"
    )
    await deploy_checkpoint(store, settings, verdict(claim, route_version=2))
    await store.pool.execute(
        "INSERT INTO babylon.releases (policy_version, author, reason) VALUES (1, 'me', 'broken')"
    )
    route = await current_route(store)
    assert [one.policy_version for one in await keep_promise._rivals(store, route)] == [0]


@pytest.mark.parametrize(
    ("gain", "drawdown", "serves"), [(100.0, 0.0, 0), (900.0, 0.0, 2), (0.5, None, 2)]
)
async def test_the_base_returns_where_the_policy_before_is_lost_too(
    store: Store,
    settings: Settings,
    claim: Claim,
    gain: float,
    drawdown: float | None,
    serves: int,
) -> None:
    """Also instead of a checkpoint that gains less than the return does, if both are dollars."""
    await deploy_checkpoint(store, settings, replace(verdict(claim), policy_version=1))
    await store.pool.execute(
        "UPDATE babylon.policies SET parent_version = 1 WHERE policy_version = 2"
    )
    now = verdict(claim, route_version=2)
    await add_pairs(store, claim, 1, 0, pairs([-700.0] * 60))
    better = replace(now, pnl_before=-700.0, pnl_after=gain - 700.0, drawdown_after=drawdown)
    await deploy_checkpoint(store, settings, better)
    assert await serving(store) == serves

"""An operator's decisions in the database: approvals, holds, windows tried again or left alone."""

import asyncio
from dataclasses import asdict
from datetime import timedelta

import pytest

from babylon.core.errors import (
    ApprovalError,
    FencedError,
    SupersededError,
    WindowError,
    WindowNotReadyError,
)
from babylon.core.settings import Settings
from babylon.core.types import Verdict
from babylon.core.windows import WindowState, parse_window_id
from babylon.stages.approval import ask, await_answer, try_to_answer, with_answer
from babylon.stages.pending import pending_windows, window_to_train
from babylon.store import Store
from babylon.store.approvals import answer_approval, ask_approval, get_approval, open_approvals
from babylon.store.attempts import list_attempts
from babylon.store.by_hand import named_window, retry_window, skip_window
from babylon.store.holds import end_hold, hold, running_hold
from babylon.store.policies import ensure_base
from babylon.store.releases import supersede
from babylon.store.routes import commit_route, current_route
from babylon.store.windows import claim_window, get_window, hold_lease, release, set_state
from tests.deployments import three_policies
from tests.integration.game import insert_real_window

WINDOW = parse_window_id("2025-11-14T09:00")


@pytest.fixture
async def verdict(store: Store) -> Verdict:
    await ensure_base(store, uri="file:///base", base_model="tiny")
    claim = await claim_window(store, WINDOW, owner="one", lease_s=60)
    return Verdict(claim=claim, policy_version=0, route_version=1, promote=True, reason="better")


async def test_an_answer_counts_once_and_outlives_the_run_that_asked(
    store: Store, verdict: Verdict
) -> None:
    with pytest.raises(ApprovalError, match="no run asked"):
        await answer_approval(store, 0, True, "alice", "")
    first = await ask(store, verdict, hours=2)
    assert [one.policy_version for one in await open_approvals(store)] == [0]
    await answer_approval(store, 0, True, "alice", "looks fine")
    assert await ask(store, verdict, hours=9) != first  # a run after a crash finds the answer
    assert await open_approvals(store) == []
    answer = await await_answer(store, 0)
    assert str(answer) == "approved by alice: looks fine"
    assert answer.open_until == first.open_until
    with pytest.raises(ApprovalError, match="approved by alice"):
        await answer_approval(store, 0, False, "bob", "")
    await try_to_answer(store, 0, False, "bob", "")
    assert (await get_approval(store, 0)).author == "alice"
    assert with_answer(verdict, answer).promote


async def test_a_refusal_and_silence_deploy_nothing(store: Store, verdict: Verdict) -> None:
    silence = await ask_approval(store, verdict.claim, 0, timedelta(0))
    assert silence.expired and await await_answer(store, 0) == silence
    assert await open_approvals(store) == []
    with pytest.raises(ApprovalError, match=r"nobody approved it .* deploy replace 0"):
        await answer_approval(store, 0, True, "late", "")
    quiet = with_answer(verdict, silence)
    assert not quiet.promote and "nobody approved it until" in quiet.reason

    await store.pool.execute("UPDATE babylon.approvals SET open_until = now() + interval '1 h'")
    waiting = asyncio.create_task(await_answer(store, 0))
    await asyncio.sleep(0)
    await answer_approval(store, 0, False, "bob", "not today")
    refused = with_answer(verdict, await waiting)
    assert not refused.promote
    assert refused.reason == "refused by bob: not today; the gate said: better"


@pytest.mark.parametrize("approved", [True, False])
async def test_an_operator_may_have_the_name_of_the_program(
    store: Store, verdict: Verdict, approved: bool
) -> None:
    """That is the account of the service and of the images."""
    await ask(store, verdict, hours=2)
    await answer_approval(store, 0, approved, "babylon", "looked at it")
    assert with_answer(verdict, await await_answer(store, 0)).promote == approved


async def test_nobody_is_asked_about_a_policy_whose_parent_leads_no_longer(store: Store) -> None:
    await three_policies(store)
    claim = await claim_window(store, WINDOW, owner="one", lease_s=60)
    verdict = Verdict(claim=claim, policy_version=1, route_version=1, promote=True, reason="better")
    await ask(store, verdict, hours=2)
    route = await current_route(store)
    await commit_route(
        store,
        policy_version=2,
        author="alice",
        reason="by hand",
        expected_route_version=route.route_version,
    )
    answer = await await_answer(store, 1)
    assert await open_approvals(store) == []
    with pytest.raises(SupersededError, match="policy 1: its update started from policy 0"):
        with_answer(verdict, answer)


async def test_a_question_ends_with_the_release_of_its_policy(store: Store) -> None:
    """Its run died, and the next one finds that another policy leads: nobody waits for a word."""
    claim = await three_policies(store)
    await ask_approval(store, claim, 2, timedelta(hours=2))
    route = await current_route(store)
    await commit_route(
        store,
        policy_version=1,
        author="alice",
        reason="by hand",
        expected_route_version=route.route_version,
    )
    await supersede(store, claim, "policy 1 leads now")
    assert await open_approvals(store) == []
    with pytest.raises(ApprovalError, match=r"refused by babylon itself: policy 1 leads now$"):
        await answer_approval(store, 2, True, "alice", "")  # nor told to deploy it by hand


async def test_while_training_is_on_hold_no_window_is_chosen(
    settings: Settings, store: Store
) -> None:
    await insert_real_window(store)
    windows = settings.windows.model_copy(update={"lookback_hours": 800_000})

    async def chosen() -> list[str]:
        return [one.key for one in await pending_windows(store, windows, settings.quality)]

    assert await chosen() == [WINDOW.key]
    await hold(store, "alice", "the game is being repaired")
    again = await hold(store, "bob", "another reason")
    assert (again.author, again.reason) == ("alice", "the game is being repaired")
    assert await chosen() == []
    with pytest.raises(WindowNotReadyError, match=r"on hold since .* by alice"):
        await window_to_train(store, windows, settings.quality)
    named = await window_to_train(store, windows, settings.quality, WINDOW.key)
    assert named == WINDOW
    assert await end_hold(store, "bob") and not await end_hold(store, "bob")
    assert await running_hold(store) is None and await chosen() == [WINDOW.key]


async def test_a_skipped_window_is_left_alone_until_it_is_to_be_tried_again(
    settings: Settings, store: Store
) -> None:
    await insert_real_window(store)
    windows = settings.windows.model_copy(update={"lookback_hours": 800_000})

    async def chosen() -> list[str]:
        return [one.key for one in await pending_windows(store, windows, settings.quality)]

    with pytest.raises(WindowError, match="nobody ever tried"):
        await retry_window(store, WINDOW, "alice")
    await skip_window(store, WINDOW, "alice", "the agents were broken")
    row = await get_window(store, WINDOW.key)
    assert row and (row.state, row.reason) == (
        WindowState.SKIPPED,
        "skipped by alice: the agents were broken",
    )
    assert await chosen() == []
    await retry_window(store, WINDOW, "bob")
    assert await chosen() == [WINDOW.key]

    claim = await claim_window(store, WINDOW, owner="one", lease_s=60)
    for act in (retry_window(store, WINDOW, "bob"), skip_window(store, WINDOW, "bob", "now")):
        with pytest.raises(WindowError, match="leased by one"):
            await act
    await set_state(store, claim, WindowState.FAILED, reason="no judge")
    assert await chosen() == []  # it rests
    await retry_window(store, WINDOW, "bob")
    assert await chosen() == [WINDOW.key]


@pytest.mark.parametrize("state", [WindowState.FAILED, WindowState.SKIPPED])
async def test_a_worker_that_wakes_after_a_retry_by_hand_still_ends_its_window(
    store: Store, state: WindowState
) -> None:
    """It looked lost. Its end counts as the first attempt, and keeps its reason."""
    claim = await claim_window(store, WINDOW, owner="slow", lease_s=60)
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now() - interval '1 s'")
    await retry_window(store, WINDOW, "alice")
    await set_state(store, claim, state, reason="no judge")
    row = await get_window(store, WINDOW.key)
    assert row and (row.state, row.attempts, row.reason) == (state, 1, "no judge")
    assert row.retry_at and row.retry_at > row.updated_at


async def test_a_recipe_that_nobody_tried_is_not_skipped(store: Store) -> None:
    recipe = parse_window_id(f"{WINDOW.id}+again")
    with pytest.raises(WindowError, match=r"\+again, and no run chooses a recipe by itself"):
        await skip_window(store, recipe, "alice", "not now")
    assert await get_window(store, recipe.key) is None


async def test_windows_are_named_by_their_own_length_and_none_of_the_future_is_skipped(
    store: Store,
) -> None:
    quarter = parse_window_id("2025-11-14T09:15", 15)
    with pytest.raises(WindowError, match="no 60-minute window starts at"):
        await named_window(store, quarter.id, 60)
    await claim_window(store, quarter, owner="one", lease_s=0)
    assert await named_window(store, quarter.id, 60) == quarter
    with pytest.raises(WindowError, match="2062-01-01T00:00 begins in the future"):
        await skip_window(store, parse_window_id("2062-01-01T00:00"), "alice", "a slip")


async def test_a_worker_that_slept_does_not_take_a_skip_back(store: Store) -> None:
    claim = await claim_window(store, WINDOW, owner="slow", lease_s=0)
    await skip_window(store, WINDOW, "alice", "the agents were broken")
    (attempt,) = await list_attempts(store, [WINDOW.key])
    assert attempt.ended_at is not None and attempt.ending == attempt.ended_in == "skipped"
    with pytest.raises(FencedError):
        await release(store, claim, "stopped", "stopped")
    with pytest.raises(FencedError):
        async with hold_lease(store, claim, 0.03):
            await asyncio.sleep(5)
    row = await get_window(store, WINDOW.key)
    assert row and row.reason == "skipped by alice: the agents were broken" and not row.leased


async def test_a_window_whose_policy_is_committed_is_finished_and_not_skipped(
    store: Store, verdict: Verdict
) -> None:
    await store.pool.execute("UPDATE babylon.windows SET state = 'trained'")
    await release(store, verdict.claim, "stopped", "stopped")
    with pytest.raises(WindowError, match=r"train --window 2025-11-14T09:00` finishes it"):
        await skip_window(store, WINDOW, "alice", "x")
    await store.pool.execute("UPDATE babylon.windows SET state = 'rejected'")
    with pytest.raises(WindowError, match="--recipe NAME"):
        await retry_window(store, WINDOW, "alice")
    assert asdict(verdict)["promote"]

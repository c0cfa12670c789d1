"""Scored windows that wait for an experiment: the schedule begins none while nothing is decided."""

import pytest

from babylon.core.settings import Settings
from babylon.core.windows import WindowState
from babylon.flows.attempt import attempt
from babylon.stages.turn import waits_undecided
from babylon.store import Store
from babylon.store.attempts import list_attempts
from babylon.store.connection import read_now
from babylon.store.experiments import keep_review
from babylon.store.policies import ensure_base
from babylon.store.routes import Split, commit_route, current_route
from babylon.store.windows import get_window, release, set_state
from tests.integration.game import WINDOW, claim

SALT = "b5a1c0ffee"


@pytest.fixture(autouse=True)
async def waiting(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy 1 is compared with policy 0, and the window waits for the decision."""
    assert settings.database.url is not None
    monkeypatch.setenv("DATABASE_URL", settings.database.url.get_secret_value())
    monkeypatch.setenv("BABYLON_HOME", str(settings.home.root))
    await ensure_base(store, uri="file:///base", base_model="tiny")
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'lora', '/nowhere', 'tiny')"
    )
    await _route(store, Split(mode="ab", challenger_version=1, share=0.5, salt=SALT))
    held = await claim(store)
    await set_state(store, held, WindowState.SCORED)
    await release(store, held, "an experiment runs", "waits")


async def _route(store: Store, split: Split | None) -> None:
    await commit_route(
        store,
        policy_version=0,
        author="test",
        reason="test",
        expected_route_version=(await current_route(store)).route_version,
        split=split,
    )


async def _review(store: Store, decision: str) -> None:
    await keep_review(store, SALT, await read_now(store), decision, {})


async def test_a_window_that_waits_is_not_claimed_at_each_look(store: Store) -> None:
    await _review(store, "insufficient")
    result = await attempt(WINDOW.key)
    assert (result.status, result.changed) == (WindowState.SCORED, False)
    assert result.reason == (
        "policy 1 is compared with policy 0, and the newest review decides nothing"
    )
    row = await get_window(store, WINDOW.key)
    assert row is not None and row.reason == "an experiment runs"
    assert len(await list_attempts(store, [WINDOW.key])) == 1


async def test_it_may_begin_once_a_review_decides_or_none_is_recent(store: Store) -> None:
    assert await waits_undecided(store, WINDOW.key) == ""  # never reviewed
    await _review(store, "insufficient")
    assert await waits_undecided(store, WINDOW.key) != ""
    await store.pool.execute(
        "UPDATE babylon.experiment_reviews SET reviewed_at = now() - interval '11 minutes'"
    )
    assert await waits_undecided(store, WINDOW.key) == ""
    await _review(store, "promote")
    assert await waits_undecided(store, WINDOW.key) == ""
    await _review(store, "insufficient")
    await _route(store, None)
    assert await waits_undecided(store, WINDOW.key) == ""  # the experiment is over


async def test_a_window_that_another_run_took_meanwhile_is_no_failure(store: Store) -> None:
    """A backfill beside the hourly run meets it at each window, and would end in red."""
    await claim(store)
    result = await attempt(WINDOW.key)
    assert (result.status, result.changed) == (WindowState.SCORED, False)
    assert result.reason == "test is training it now"


async def test_a_window_that_is_not_scored_or_is_lost_begins(store: Store) -> None:
    await _review(store, "insufficient")
    assert await waits_undecided(store, "2025-11-14T10:00") == ""  # never claimed
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now()")
    assert await waits_undecided(store, WINDOW.key) == ""

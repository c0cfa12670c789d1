"""A window that was scored and waits for its training: when its scores are kept."""

import pytest

from babylon.core.settings import Settings
from babylon.core.windows import WindowState
from babylon.stages.claim import claimed, commit_collected, commit_scored, resume
from babylon.stages.collect import collect_window
from babylon.stages.dropout import thin_window
from babylon.stages.fingerprint import scoring_fingerprint
from babylon.stages.score import score_window
from babylon.stages.validate import validate_window
from babylon.store import Store
from babylon.store.published import withhold
from babylon.store.windows import get_window, release
from tests.integration.game import WINDOW, claim, insert_real_window


async def scored_and_left(store: Store, settings: Settings) -> None:
    """Score the window, and leave it as a run does that waits for an experiment."""
    await insert_real_window(store)
    held = await claim(store)
    collected = await collect_window(store, settings.home, held, WINDOW)
    await commit_collected(store, collected)
    thinned = thin_window(settings, await validate_window(store, settings, collected))
    await commit_scored(store, await score_window(store, settings, thinned))
    await release(store, held, "an experiment runs", "waits")


async def test_play_that_nobody_touched_is_trained_with_its_scores(
    store: Store, settings: Settings
) -> None:
    await scored_and_left(store, settings)
    async with claimed(store, settings.windows, WINDOW) as again:
        scored, _ = await resume(store, scoring_fingerprint(settings), again)
    assert scored is not None and scored.claim == again and scored.artifact.rows == 5


@pytest.mark.parametrize("why", ["taken down", "trained"])
async def test_play_that_was_taken_down_or_trained_since_is_left_out(
    store: Store, settings: Settings, why: str
) -> None:
    """It may wait for days while an experiment runs."""
    await scored_and_left(store, settings)
    if why == "taken down":
        await withhold(store, "agent", "test-agent-3", "asked")
    else:  # by a window of another length, or by another recipe
        await store.pool.execute(
            "INSERT INTO babylon.trained (trajectory_id, window_id, batch_id)"
            ' SELECT "trajectoryId", $1, $1 FROM trajectories WHERE "agentId" = $2',
            "2025-11-14T08:00",
            "test-agent-3",
        )
    async with claimed(store, settings.windows, WINDOW) as again:
        assert await resume(store, scoring_fingerprint(settings), again) == (None, None)
        row = await get_window(store, WINDOW.key)
        assert row is not None and row.state == WindowState.CLAIMED
        collected = await collect_window(store, settings.home, again, WINDOW)
        validated = await validate_window(store, settings, collected)
    assert validated.agents == 4

"""The whole chain on the real window, and every way in which it can end."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from babylon.core.errors import ConfigError, ModelError, TrainingError, WindowNotReadyError
from babylon.core.settings import Settings
from babylon.core.windows import Window, WindowState, parse_window_id, window_at
from babylon.flows.backfill import backfill
from babylon.flows.publish_dataset import publish_dataset
from babylon.flows.train_window import train_window
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.readiness import window_reports
from babylon.store import Store
from babylon.store.attempts import list_attempts
from babylon.store.policies import champion, list_policies
from babylon.store.windows import get_window, list_windows
from babylon.tasks import retire
from babylon.training.backends.train_input import Progress
from tests.conftest import real_rows
from tests.deployments import announced
from tests.flows.conftest import Workshop, play_the_next_hour
from tests.integration.game import insert

WINDOW, LATER = "2025-11-14T09:00", "2025-11-14T10:00"
HOURS = 876_000
LATE = {"id": "late", "trajectoryId": "late"}
METRICS = {
    "window_id",
    "agents",
    "trajectories",
    "avg_reward",
    "training_loss",
    "kl_divergence",
    "deployment_success",
    "duration_minutes",
    "win_rate_before",
    "win_rate_after",
    "pnl_before",
    "pnl_after",
}


async def test_a_window_goes_all_the_way_and_a_second_run_changes_nothing(
    played: Settings, store: Store, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "babylon-test")
    orphan = played.home.checkpoints / "2025-11-14T0900-e0"  # of a claim before this one
    orphan.mkdir(parents=True)
    result = await train_window(WINDOW)
    assert result.status == WindowState.DEPLOYED and result.changed
    assert result.metrics.keys() >= METRICS
    assert result.metrics["agents"] == 5 and result.metrics["deployment_success"] is True
    assert (await champion(store))[0].policy_version == 1
    row = await get_window(store, WINDOW)
    assert row is not None and row.metrics.items() >= result.metrics.items()
    assert list(played.home.datasets.rglob("*.parquet"))
    assert len(list(played.home.root.glob("wandb/offline-run-*/run-babylon.wandb"))) == 1
    assert not orphan.exists()

    again = await train_window(WINDOW)
    assert (again.status, again.changed) == (WindowState.DEPLOYED, False)
    assert "nothing was changed" in again.reason
    assert workshop.trained == [WINDOW]
    assert await get_window(store, WINDOW) == row


async def test_a_finished_window_stays_finished_when_what_comes_after_it_fails(
    played: Settings,
    store: Store,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "babylon-test")
    played.home.root.mkdir()
    (played.home.root / "wandb").write_text("a file where a directory belongs")
    (tmp_path / "adapter_config.json").write_text("{ cut off")
    await store.pool.execute("UPDATE babylon.policies SET uri = $1", str(tmp_path))
    result = await train_window(WINDOW)
    assert (result.status, result.changed) == (WindowState.DEPLOYED, True)
    row = await get_window(store, WINDOW)
    assert row is not None and row.state == WindowState.DEPLOYED
    tracked, retired = [m for m in caplog.messages if m.startswith(f"{WINDOW} is over; ")]
    assert "cannot make the directory" in tracked and "no checkpoint was removed" in retired


async def test_a_step_of_retention_that_fails_stops_no_other(
    played: Settings,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[str] = []

    def failing(name: str) -> Callable[..., int]:
        def fail(*_: object, **__: object) -> int:
            ran.append(name)
            raise OSError(f"{name} failed")

        return fail

    (tmp_path / "adapter_config.json").write_text("{ cut off")
    await store.pool.execute("UPDATE babylon.policies SET uri = $1", str(tmp_path))
    steps = ["retire_play", "remove_old_results", "remove_old_runs"]
    for name in steps:
        monkeypatch.setattr(retire, name, failing(name))
    with pytest.raises(ModelError, match="no checkpoint was removed"):
        await retire.retire.fn(played)
    assert ran == steps
    assert [m for m in caplog.messages if m.startswith("retire: ")] == [
        f"retire: {name} failed" for name in steps
    ]


async def test_a_worse_challenger_never_serves(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    workshop.promote = False
    result = await train_window(WINDOW)
    assert (result.status, result.reason) == (WindowState.REJECTED, "worse")
    assert result.metrics["deployment_success"] is False
    assert (await champion(store))[0].policy_version == 0


async def test_failed_checks_reject_the_checkpoint(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    async with announced(store):  # a gateway runs, so there are checks
        result = await train_window(WINDOW)
    assert result.status == WindowState.REJECTED
    assert result.reason.startswith("policy 1 is refused: ")
    assert result.metrics["deployment"] == result.reason
    assert (result.metrics["promoted"], result.metrics["arm"]) == (True, None)
    assert (await champion(store))[0].policy_version == 0


async def test_with_strategy_ab_the_checkpoint_becomes_challenger(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    result = await train_window(WINDOW, overrides={"deployment": {"strategy": "ab"}})
    assert (result.status, result.reason) == (WindowState.DEPLOYED, "challenger at 50%: not worse")
    assert (result.metrics["arm"], result.metrics["deployment_success"]) == ("challenger", True)
    assert (await champion(store))[0].policy_version == 0


async def test_a_window_with_too_few_agents_is_skipped(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    result = await train_window(WINDOW, overrides={"windows": {"min_agents": 50}})
    assert result.status == WindowState.SKIPPED and "50" in result.reason
    row = await get_window(store, WINDOW)
    assert row is not None and (row.state, row.reason) == (WindowState.SKIPPED, result.reason)
    assert workshop.trained == []
    assert await backfill(hours=HOURS) == []  # it rests
    await store.pool.execute("UPDATE babylon.windows SET retry_at = NULL")
    assert (await backfill(hours=HOURS))[0].status == WindowState.DEPLOYED  # 3 are enough for it


async def test_a_window_of_equal_scores_is_skipped_once(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    workshop.training_error = WindowNotReadyError("all scores are equal")
    (skipped,) = await backfill(hours=HOURS)
    assert (skipped.status, skipped.reason) == (WindowState.SKIPPED, "all scores are equal")
    workshop.training_error = None
    assert await backfill(hours=HOURS) == []
    (report,) = await window_reports(store, played.windows, CheckedRows(played.quality))
    assert report.missing[1:] == (
        "all scores are equal; nothing was played since (train --window tries it again)",
    )
    await store.pool.execute("UPDATE babylon.windows SET retry_at = NULL")
    assert await backfill(hours=HOURS) == []
    await insert(store, "trajectories", [{**real_rows("trajectories")[0], **LATE}])
    (trained,) = await backfill(hours=HOURS)
    assert (trained.status, trained.metrics["trajectories"]) == (WindowState.DEPLOYED, 6)


async def test_a_failed_window_may_be_trained_again(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    workshop.training_error = TrainingError("loss is nan")
    with pytest.raises(TrainingError, match="loss is nan"):
        await train_window(WINDOW)
    row = await get_window(store, WINDOW)
    assert row is not None and (row.state, row.reason) == (WindowState.FAILED, "loss is nan")
    workshop.training_error = None
    assert (await train_window(WINDOW)).status == WindowState.DEPLOYED


async def test_an_evaluator_that_does_not_load_costs_no_update(
    played: Settings, store: Store, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALUATOR", "no_such_desk:Desk")
    with pytest.raises(ConfigError, match="EVALUATOR=no_such_desk:Desk"):
        await train_window(WINDOW)
    assert workshop.trained == []


async def test_a_trained_window_is_resumed_at_validation(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    workshop.validation_error = RuntimeError("power cut")
    with pytest.raises(RuntimeError):
        await train_window(WINDOW)
    row = await get_window(store, WINDOW)
    assert row is not None and row.state == WindowState.TRAINED
    assert row.reason.startswith("RuntimeError at conftest.py:") and not row.leased

    workshop.validation_error = None
    result = await train_window(WINDOW)
    assert result.status == WindowState.DEPLOYED
    assert result.metrics.keys() >= METRICS and result.metrics["training_loss"] == 0.5
    assert workshop.trained == [WINDOW]
    assert len(await list_policies(store)) == 2


async def test_a_window_whose_parent_was_replaced_is_trained_again_from_the_new_champion(
    played: Settings, store: Store, workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    async def another_leads(store: Store) -> None:
        workshop.meanwhile = None
        await store.pool.execute(
            "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
            " VALUES (1, 0, 'lora', '/nowhere', 'tiny');"
            "INSERT INTO babylon.routes (route_version, policy_version, author, reason)"
            " VALUES (2, 1, 'another run', 'better')"
        )

    workshop.meanwhile = another_leads
    result = await train_window(WINDOW)
    assert (result.status, workshop.trained) == (WindowState.DEPLOYED, [WINDOW, WINDOW])
    assert result.metrics["parent_version"] == 1
    assert f"window {WINDOW} is trained again: its update started from policy 0" in caplog.text
    attempts = await list_attempts(store, [WINDOW])
    assert [(one.began_from, one.ending) for one in attempts] == [
        ("claimed", "superseded"),
        ("scored", "deployed"),
    ]
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.judgments") == 0
    fates = await store.pool.fetch(
        "SELECT DISTINCT fate FROM babylon.learning WHERE fate <> 'free'"
    )
    assert [row["fate"] for row in fates] == ["in the champion's line"]


async def test_a_half_finished_window_is_deployed_before_another_is_trained(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    await play_the_next_hour(store)
    workshop.validation_error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await train_window(LATER)
    workshop.validation_error = None
    result = await train_window(WINDOW)
    assert (result.status, workshop.trained) == (WindowState.DEPLOYED, [LATER, WINDOW])
    parents = [(one.window_id, one.parent_version) for one in await list_policies(store)]
    assert parents == [(None, None), (LATER, 0), (WINDOW, 1)]


async def test_a_window_waits_scored_while_an_experiment_runs(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'lora', '/nowhere', 'tiny');"
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason, mode,"
        " challenger_version, share, salt) VALUES (2, 0, 'operator', '', 'ab', 1, 0.5, 'salt')"
    )
    waits = await train_window(WINDOW)
    assert (waits.status, waits.changed, workshop.trained) == (WindowState.SCORED, False, [])
    assert waits.reason.startswith("policy 1 is compared with policy 0")
    await store.pool.execute(
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason)"
        " VALUES (3, 1, 'operator', 'it won')"
    )
    (result,) = await backfill(hours=HOURS)
    assert (result.status, result.metrics["parent_version"]) == (WindowState.DEPLOYED, 1)
    endings = [one.ending for one in await list_attempts(store, [WINDOW])]
    assert endings == ["waits", "deployed"]


async def test_a_cancelled_run_stops_computing_and_leaves_the_window_to_the_next(
    played: Settings, store: Store, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Event(), threading.Event()

    def compute(progress: Progress) -> None:
        try:
            for step in range(3000):
                progress(step, 3000)
                started.set()
                time.sleep(0.01)
        finally:
            ended.set()

    async def endless(*_: object, progress: Progress, member: int | None) -> None:
        await asyncio.to_thread(compute, progress)

    monkeypatch.setattr("babylon.tasks.train.train_window", endless)
    run = asyncio.create_task(train_window(WINDOW))
    await asyncio.to_thread(started.wait, 60)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await asyncio.to_thread(ended.wait, 60)
    row = await get_window(store, WINDOW)
    assert row is not None and (row.state, row.leased) == (WindowState.SCORED, False)
    assert (row.reason, row.attempts) == ("stopped by a signal", 0)

    monkeypatch.setattr("babylon.tasks.train.train_window", workshop.train)
    assert (await train_window(WINDOW)).status == WindowState.DEPLOYED


async def test_a_window_that_is_not_over_is_refused(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    current = window_at(datetime.now(UTC) + timedelta(minutes=1))  # this hour or the next
    with pytest.raises(WindowNotReadyError, match=f"ends at {current.end:%Y-%m-%dT%H:%M}"):
        await train_window(current.id)
    assert await list_windows(store) == []


async def test_prefect_artifacts_show_the_whole_run(
    played: Settings, workshop: Workshop, pages: Callable[[str], Awaitable[list[str]]]
) -> None:
    await train_window(WINDOW)
    (quality,) = await pages("quality")
    assert WINDOW in quality
    (update,) = await pages("update")
    assert update.startswith(f"# Window {WINDOW}: policy 0 became 1")
    assert "| training_loss | 0.5 | mean over train steps |" in update
    (gate,) = await pages("gate")
    assert gate.startswith(f"# Window {WINDOW}, policy 1: promote")
    assert "| mean P&L, $ | 1.0 | 2.0 |" in gate and "Recorded play: not checked" in gate


@pytest.fixture
def wrong_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Sets the clock that this worker's code reads wrong; the database keeps its own."""

    def set_wrong(by: timedelta) -> None:
        class Wrong(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return datetime.now(tz) + by

        for name, module in list(sys.modules.items()):
            ours = name.partition(".")[0] in ("babylon", "flows", "tasks")
            if ours and getattr(module, "datetime", None) is datetime:
                monkeypatch.setattr(module, "datetime", Wrong)

    return set_wrong


async def play_in(store: Store, window: Window) -> None:
    """The real window's play, as if it had taken place in another one."""
    await store.pool.execute(
        'UPDATE trajectories SET "windowId" = $1, "startTime" = "startTime" + $2,'
        ' "endTime" = "endTime" + $2',
        window.id,
        window.start - parse_window_id(WINDOW).start,
    )


async def test_a_worker_whose_clock_is_an_hour_ahead_does_not_train_an_open_window(
    played: Settings, store: Store, workshop: Workshop, wrong_clock: Callable[[timedelta], None]
) -> None:
    current = window_at(datetime.now(UTC) + timedelta(minutes=1))  # this hour or the next
    await play_in(store, current)
    wrong_clock(timedelta(hours=2))
    with pytest.raises(WindowNotReadyError, match=f"window {current.id} is open"):
        await train_window(current.id)
    assert await backfill() == []
    assert (await train_window()).status == WindowState.SKIPPED  # the last one, and nothing in it
    assert await get_window(store, current.id) is None
    assert workshop.trained == []


async def test_a_worker_whose_clock_is_behind_trains_what_is_over(
    played: Settings, store: Store, workshop: Workshop, wrong_clock: Callable[[timedelta], None]
) -> None:
    last = window_at(datetime.now(UTC)).previous()
    await play_in(store, last)
    wrong_clock(-timedelta(hours=5))
    at_once = {"grace_s": 0, "outcomes_wait_s": 0}
    (result,) = await backfill(overrides={"windows": at_once})
    assert (result.window_id, result.status) == (last.id, WindowState.DEPLOYED)


async def test_equal_scores_are_reused(played: Settings, store: Store, workshop: Workshop) -> None:
    """An update that had begun goes on with its very batch, whatever was played since."""

    async def dies() -> int:
        """Return the number of trajectories that the run that died had scored."""
        workshop.training_error = asyncio.CancelledError()
        with pytest.raises(asyncio.CancelledError):
            await train_window(WINDOW)
        row = await get_window(store, WINDOW)
        assert row is not None and row.state == WindowState.SCORED
        return int(row.metrics["trajectories"])

    assert await dies() == 5
    await insert(store, "trajectories", [{**real_rows("trajectories")[0], **LATE}])
    assert await dies() == 5  # the same settings: the same batch
    for scored in played.home.artifacts.glob("*scored*"):
        scored.unlink()
    assert await dies() == 6
    workshop.training_error = None
    result = await train_window(WINDOW, overrides={"seed": 7})
    assert (result.status, result.metrics["trajectories"]) == (WindowState.DEPLOYED, 6)


async def test_rows_that_an_earlier_scoring_left_out_are_counted_anew(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    """Else the trained trajectories of the second would pass for held-out play of the first."""
    workshop.training_error = TrainingError("loss is nan")
    thin = {"quality": {"target_trajectories": 4, "max_dropout": 0.5}, "windows": {"min_agents": 2}}
    with pytest.raises(TrainingError):
        await train_window(WINDOW, overrides=thin)
    row = await get_window(store, WINDOW)
    assert row is not None and row.scored is not None
    assert row.scored.held_out is not None and row.metrics["held_out"] == 1
    workshop.training_error = None
    await train_window(WINDOW)
    row = await get_window(store, WINDOW)
    assert row is not None and row.state == WindowState.DEPLOYED and row.scored is not None
    assert row.scored.held_out is None and row.metrics["held_out"] == 0


async def test_recipes_take_late_rows(played: Settings, store: Store, workshop: Workshop) -> None:
    assert (await train_window(WINDOW)).metrics["late"] == 0
    rows = [{**real_rows("trajectories")[n], "id": f"late{n}"} for n in range(3)]
    await insert(store, "trajectories", [{**r, "trajectoryId": r["id"]} for r in rows])
    assert await backfill(hours=HOURS) == []
    (report,) = await window_reports(store, played.windows, CheckedRows(played.quality))
    assert (report.state, report.late, report.trained) == (WindowState.DEPLOYED, 3, 5)

    recipe = {"windows": {"recipe": "again", "lookback_hours": HOURS}}
    (without,) = await backfill(overrides=recipe)
    assert without.status == WindowState.SKIPPED and "0 eligible agents" in without.reason
    key = f"{WINDOW}+again"
    assert (without.window_id, workshop.trained) == (key, [WINDOW])
    assert await backfill(overrides=recipe) == []

    late = {"windows": {"recipe": "late", "include_late": True, "lookback_hours": HOURS}}
    (trained,) = await backfill(overrides=late)
    assert (trained.window_id, trained.status) == (f"{WINDOW}+late", WindowState.DEPLOYED)
    assert trained.metrics["trajectories"] == 3
    assert await backfill(overrides=late) == []
    assert workshop.trained == [WINDOW, f"{WINDOW}+late"]
    files = sorted(played.home.datasets.rglob("*.parquet"))
    await publish_dataset(day=parse_window_id(WINDOW).start.date())
    assert sorted(played.home.datasets.rglob("*.parquet")) == files  # under the very same names
    batches = await store.pool.fetch(
        "SELECT window_id, count(*) FROM babylon.trained GROUP BY 1 ORDER BY 1"
    )
    assert [tuple(row) for row in batches] == [(WINDOW, 5), (f"{WINDOW}+late", 3)]
    again = await train_window(f"{WINDOW}+late")
    assert (again.status, again.changed) == (WindowState.DEPLOYED, False)
    assert len(await list_policies(store)) == 3


async def test_recipes_need_done_windows(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    result = await train_window(WINDOW, overrides={"windows": {"recipe": "again"}})
    assert result.status == WindowState.SKIPPED and "train it without --recipe" in result.reason
    assert await list_windows(store) == []

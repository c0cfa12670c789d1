"""Play that stays: one test for each reason. Every reason is the only one in its test."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from babylon.core.windows import WindowState
from babylon.stages.in_use import oldest_in_use, spent
from babylon.store.play_in_use import WindowUse

NOW = datetime(2026, 3, 1, tzinfo=UTC)
BEFORE = NOW - timedelta(days=30)
OLD = WindowUse(
    window_id="2025-11-14T09:00",
    minutes=60,
    state=WindowState.DEPLOYED,
    leased=False,
    changed_at=datetime(2025, 11, 14, 10, 5, tzinfo=UTC),
    has_checkpoint=False,
    retired=False,
    artifacts=("home:artifacts/x.parquet",),
)


def is_kept(window: WindowUse, *others: WindowUse, published: set[str] | None = None) -> bool:
    return window.window_id not in spent([window, *others], before=BEFORE, published=published)


def test_old_play_that_nothing_uses_goes() -> None:
    assert not is_kept(OLD)
    assert not is_kept(replace(OLD, state=WindowState.SKIPPED))


def test_play_that_can_still_be_trained_stays() -> None:
    assert is_kept(replace(OLD, window_id=f"{BEFORE:%Y-%m-%dT%H:%M}"))
    assert not is_kept(replace(OLD, window_id=f"{BEFORE - timedelta(hours=2):%Y-%m-%dT%H:%M}"))


def test_the_play_of_a_lately_trained_backfill_stays() -> None:
    assert is_kept(replace(OLD, changed_at=BEFORE))


def test_the_play_of_a_window_that_a_worker_holds_stays() -> None:
    assert is_kept(replace(OLD, state=WindowState.SCORED, leased=True))


def test_play_whose_checkpoint_must_still_be_judged_stays() -> None:
    assert is_kept(replace(OLD, state=WindowState.TRAINED))


def test_play_of_a_checkpoint_that_can_be_rolled_back_to_stays() -> None:
    assert is_kept(replace(OLD, has_checkpoint=True))


def test_play_that_must_still_be_published_stays_where_anything_is_published() -> None:
    assert is_kept(OLD, published={"2025-11-14T10:00"})
    assert not is_kept(OLD, published={"2025-11-14T09:00"})
    assert not is_kept(replace(OLD, artifacts=()), published={"2025-11-14T10:00"})


def test_play_that_was_only_judged_again_is_never_published() -> None:
    again = replace(OLD, window_id=f"{OLD.window_id}+judged-again", state=WindowState.SKIPPED)
    assert not is_kept(OLD, again, published={OLD.window_id})


def test_play_that_a_window_of_another_length_uses_stays() -> None:
    quarter = replace(OLD, window_id="2025-11-14T09:45", minutes=15)
    assert is_kept(quarter, replace(OLD, has_checkpoint=True))
    assert is_kept(OLD, replace(quarter, has_checkpoint=True))
    assert not is_kept(OLD, replace(quarter, window_id="2025-11-14T10:00", has_checkpoint=True))


def test_play_that_a_recipe_uses_stays() -> None:
    recipe = replace(OLD, window_id=f"{OLD.window_id}+short", state=WindowState.TRAINED)
    assert is_kept(OLD, recipe) and is_kept(recipe, OLD)


def oldest(*, lookback_hours: int = 168, began: datetime | None = None) -> datetime:
    return oldest_in_use(NOW, days=30, lookback_hours=lookback_hours, experiment_began=began)


def test_a_longer_lookback_and_a_running_experiment_keep_more() -> None:
    assert oldest() == BEFORE
    assert oldest(lookback_hours=24 * 60) == NOW - timedelta(days=60)
    assert oldest(began=NOW - timedelta(days=40)) == NOW - timedelta(days=40)
    assert oldest(began=NOW - timedelta(days=1)) == BEFORE

"""Window ids, and from when on a window may be trained."""

from datetime import UTC, datetime, timedelta

import pytest

from babylon.errors import WindowError, WindowNotReadyError
from babylon.windows import parse_window_id, settled_window

CLOSES = datetime(2025, 11, 14, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("after_s", "said"),
    [(-1, "it ends at 2025-11-14T10:00 UTC"), (0, "until 2025-11-14T10:01:00"), (59, "has just")],
)
def test_a_window_whose_rows_may_still_arrive_is_refused(after_s: int, said: str) -> None:
    now = CLOSES + timedelta(seconds=after_s)
    with pytest.raises(WindowNotReadyError, match=said):
        settled_window("2025-11-14T09:00", now, 60, grace_s=60)


def test_a_settled_window_is_taken() -> None:
    now = CLOSES + timedelta(seconds=60)
    assert settled_window("2025-11-14T09:00", now, 60, grace_s=60).end == CLOSES


@pytest.mark.parametrize("text", ["9999-12-31T23:00", "0001-01-01T00:00"])
def test_a_window_at_the_end_of_the_calendar_is_refused(text: str) -> None:
    with pytest.raises(WindowError, match="is not between 1970 and 9998"):
        parse_window_id(text)

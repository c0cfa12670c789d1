"""From when on a window may be trained."""

from datetime import UTC, datetime, timedelta

import pytest

from babylon.errors import WindowNotReadyError
from babylon.windows import settled_window

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

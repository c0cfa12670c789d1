"""Pictures of the pages."""

from babylon.ops.pages.pictures import pnl_picture, score_picture, update_picture


def test_a_picture_needs_a_figure_and_windows_without_one_leave_a_gap() -> None:
    windows = [("2025-11-14T09:00", {}), ("2025-11-14T10:00", {"pnl_before": 1.0, "pnl_after": 2})]
    assert update_picture(windows) is None
    assert pnl_picture(windows[:1]) is None
    assert score_picture([]) is None
    drawn = pnl_picture(windows)
    assert drawn is not None and b"challenger" in drawn and b"11-14" in drawn
    assert drawn == pnl_picture(windows)  # the same figures make the same page
    assert len(drawn) < 40_000

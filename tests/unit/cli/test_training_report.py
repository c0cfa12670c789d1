"""The closing words of ``babylon train``."""

from pathlib import Path

import pytest

from babylon.cli.training_report import print_training, training_report, window_table
from babylon.core.home import Home
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState

WINDOW = "2025-11-14T09:00"


@pytest.mark.parametrize(
    ("state", "changed", "pointed"),
    [
        (WindowState.DEPLOYED, True, True),
        (WindowState.DEPLOYED, False, False),
        (WindowState.SKIPPED, True, False),
        (WindowState.FAILED, True, False),
    ],
)
def test_only_a_run_that_trained_a_window_points_to_new_policies(
    state: WindowState, changed: bool, pointed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    window = WindowResult(window_id=WINDOW, status=state, reason="a reason", changed=changed)
    print_training(training_report("single", [window], None), [window], Home.at(Path("home")))
    printed = capsys.readouterr().out
    assert "a reason" in printed
    assert ("Where to look next" in printed) is pointed


def test_scores_of_a_task_of_ones_own_are_told_apart() -> None:
    metrics = {"pnl_before": 0.6123, "pnl_after": 0.6491}
    window = WindowResult(window_id=WINDOW, status=WindowState.DEPLOYED, reason="", metrics=metrics)
    columns, (row,) = window_table([window])
    assert str(row[columns.index("P&L")]) == "0.6123→0.6491"

from pathlib import Path

from babylon.core.types import WindowResult
from babylon.ops.demo import Final, levels
from babylon.ops.demo_plot import plot_windows


def test_the_plot_is_a_picture_even_of_windows_that_were_not_trained(tmp_path: Path) -> None:
    final = Final(
        scenarios=512,
        pnl_base=0.0,
        pnl_sft=200.0,
        pnl_final=300.0,
        rule="bold",
        pnl_rule=509.0,
        pnl_oracle=570.0,
        difference=300.0,
        difference_low=290.0,
        difference_high=310.0,
        gap_closed=0.6,
        win_rate_base=0.1,
        win_rate_final=0.8,
    )
    results = [
        WindowResult(
            window_id="2026-11-21T04:00",
            status="deployed",
            metrics={"pnl_after": 60.0, "deployment_success": True},
        ),
        WindowResult(
            window_id="2026-11-21T05:00",
            status="rejected",
            metrics={"pnl_after": 40.0, "deployment_success": False},
        ),
        WindowResult(window_id="2026-11-21T06:00", status="skipped", reason="too few agents"),
    ]
    path = plot_windows(results, [10.0, 50.0, 55.0], levels(final), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000

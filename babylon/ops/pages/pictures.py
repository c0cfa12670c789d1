"""Pictures of the pages, as SVG on a transparent ground: readable in light and in dark.

Every function is blocking and returns ``None`` when there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from babylon.core.types import Metrics
from babylon.evaluation.arena.match_page import GREY, PICTURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BEFORE, _AFTER = "#4c8dd6", "#e07b39"  # apart also for eyes that cannot see red or green
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "babylon",  # the same figures make the same bytes
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color"), GREY),
    "font.size": 9.0,
}
Named = tuple[str, Metrics]  # a window's id and metrics


def pnl_picture(windows: Sequence[Named]) -> bytes | None:
    """Draw the gate's P&L of champion and challenger, window by window."""
    series = [("pnl_before", "champion", _BEFORE, "o-"), ("pnl_after", "challenger", _AFTER, "^--")]
    return _by_window(windows, series, "mean P&L in the gate, $")


def update_picture(windows: Sequence[Named]) -> bytes | None:
    """Draw loss and KL of each window's update."""
    return _by_window(
        windows,
        [
            ("training_loss", "loss", _BEFORE, "o-"),
            ("kl_divergence", "KL to the parent", _AFTER, "^--"),
        ],
        "loss, and KL in nats a token",
    )


def score_picture(points: Iterable[tuple[float, float]]) -> bytes | None:
    """Draw one point a trajectory: P&L in USD, score."""
    found = list(points)
    if not found:
        return None
    pnl, scores = zip(*found, strict=True)

    def draw(axes: Axes) -> None:
        axes.scatter(pnl, scores, color=_BEFORE, s=18, alpha=0.7, linewidths=0)
        axes.set_xlabel("P&L of the trajectory, $")
        axes.set_ylabel("score")

    return _svg(draw)


def gate_pictures(report: Path | None) -> dict[str, bytes]:
    """Read the gate's pictures from its report: name → PNG. Retention removes old reports."""
    if report is None:
        return {}
    paths = [report / name for name in PICTURES]
    return {path.stem: path.read_bytes() for path in paths if path.is_file()}


def _by_window(
    windows: Sequence[Named], series: Sequence[tuple[str, str, str, str]], label: str
) -> bytes | None:
    lines = [
        (name, color, style, points)
        for metric, name, color, style in series
        if (points := [(at, v) for at, v in enumerate(_values(windows, metric)) if v is not None])
    ]
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        for name, color, style, points in lines:
            axes.plot(*zip(*points, strict=True), style, color=color, label=name, markersize=4)
        step = max(1, len(windows) // 8)
        ticks = range(0, len(windows), step)
        axes.set_xticks(list(ticks), [windows[at][0][5:].replace("T", "\n") for at in ticks])
        axes.set_ylabel(label)
        axes.legend(frameon=False)

    return _svg(draw)


def _values(windows: Sequence[Named], metric: str) -> list[float | None]:
    found = [metrics.get(metric) for _, metrics in windows]
    return [float(one) if isinstance(one, int | float) else None for one in found]


def _svg(draw: Callable[[Axes], None]) -> bytes:
    # Imported here because it takes a second, and most runs of a flow draw nothing.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(7, 3), layout="constrained")  # not pyplot, which keeps figures
        draw(figure.subplots())
        file = BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()

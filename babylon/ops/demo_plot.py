"""Plot of the demo: P&L by window."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from babylon.core.types import WindowResult

COLORS = ("black", "tab:purple", "grey", "tab:orange", "tab:green")  # of levels


def plot_windows(
    results: Sequence[WindowResult],
    fleet_pnl: Sequence[float],
    levels: Mapping[str, float],
    directory: Path,
) -> Path:
    """Write ``pnl_by_window.png``: P&L of the fleet and of each challenger, by window.

    ``levels``: name → mean P&L, drawn as horizontal lines.
    """
    # not pyplot, which keeps every figure alive in a global list
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    labels = [result.window_id[5:].replace("T", "\n") for result in results]
    at = range(len(results))
    axes.plot(at, fleet_pnl, "o-", color="tab:blue", label="fleet, as played")
    gate = [result.metrics.get("pnl_after") for result in results]
    deployed = [bool(result.metrics.get("deployment_success")) for result in results]
    for passed, color, name in ((True, "tab:green", "deployed"), (False, "tab:red", "rejected")):
        points = [
            (x, y)
            for x, y, ok in zip(at, gate, deployed, strict=True)
            if ok is passed and isinstance(y, float)
        ]
        if points:
            axes.scatter(
                *zip(*points, strict=True), color=color, marker="^", label=f"challenger, {name}"
            )
    for (name, pnl), color in zip(levels.items(), cycle(COLORS), strict=False):
        axes.axhline(pnl, color=color, linestyle="--", label=name)
    axes.set_xticks(list(at), labels, fontsize=8)
    axes.set_xlabel("window (UTC)")
    axes.set_ylabel("mean P&L of a scenario, $")
    axes.set_title("P&L of the fleet and of each challenger, hour by hour")
    axes.legend(loc="lower right", fontsize=8)
    path = directory / "pnl_by_window.png"
    figure.savefig(path, dpi=120)
    return path

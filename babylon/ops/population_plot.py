"""The lineage of a population as a picture: generations from left to right."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from babylon.ops.population_page import MemberStanding

_MARKS = {"founder": "o", "elite": "*", "mutant": "^"}


def plot_lineage(standings: Sequence[MemberStanding], path: Path) -> Path:
    """Write the picture. Height is fitness, and size the number of windows that a member won.

    A member without fitness is drawn at the bottom, hollow.
    """
    # not pyplot, which keeps every figure alive in a global list
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    known = [one.fitness for one in standings if one.fitness is not None]
    floor = min([0.0, *known]) - 1.0
    height = {
        (one.generation, one.member): floor if one.fitness is None else one.fitness
        for one in standings
    }
    for one in standings:
        own = height[one.generation, one.member]
        before = height.get((one.generation - 1, -1 if one.parent is None else one.parent))
        if before is not None:
            axes.plot([one.generation - 1, one.generation], [before, own], color="lightgrey")
        axes.scatter(
            one.generation,
            own,
            s=40 + 40 * one.chosen,
            marker=_MARKS.get(one.origin, "o"),
            facecolors="none" if one.fitness is None else "tab:blue",
            edgecolors="tab:blue",
            zorder=3,  # above the lines
        )
        axes.annotate(
            str(one.member), (one.generation, own), xytext=(6, 4), textcoords="offset points"
        )
    for origin, mark in _MARKS.items():
        axes.scatter([], [], marker=mark, color="tab:blue", label=origin)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xticks(sorted({one.generation for one in standings}))
    axes.set_xlabel("generation")
    axes.set_ylabel("fitness: P&L less the parent's, $ a world")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path

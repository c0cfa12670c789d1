"""What became of a policy after many hours: did it keep what it had learned?

A run is *lost* once the fleet's mean P&L over ``SPAN`` hours falls below the base model's, or below
half of the best gain so far, and stays there to the end; or if its last actions fail more
often than ``MOST_FAILED``. Runs that are not finished count as far as they came.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.curriculum.results import stored

SPAN = 10  # hours: the mean of one hour's few worlds says little
MOST_FAILED = 0.1
KEPT = 0.5  # share of the best gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A run's hours in sums. P&L is the fleet's mean over ``SPAN`` hours, in dollars."""

    hours: int
    first: float
    best: float
    last: float
    failed: float  # in the last ``SPAN`` hours
    entropy: float  # after the last hour that was trained, nats a token
    undone: int  # iterations

    @property
    def lost(self) -> bool:
        gained, kept = self.best - self.first, self.last - self.first
        return self.failed > MOST_FAILED or kept < KEPT * gained


def course(hours: Sequence[dict[str, Any]]) -> Course:
    """Sum up the hours of a run."""
    span = min(SPAN, len(hours))
    pnl = [hour["fleet_pnl"] for hour in hours]
    means = [sum(pnl[end - span : end]) / span for end in range(span, len(pnl) + 1)]
    return Course(
        hours=len(hours),
        first=pnl[0],  # played by the base model
        best=max(means),
        last=means[-1],
        failed=sum(hour["failed"] for hour in hours[-span:]) / span,
        entropy=next((e for h in reversed(hours) if (e := h["entropy"]) is not None), 0.0),
        undone=sum(hour["undone"] for hour in hours),
    )


def stability(results: Path) -> list[str]:
    """Return a Markdown table: one row for each run of ``ours``, by level and settings."""
    lines = [
        "| run | hours | base | best | last | failed | entropy | undone | |",
        "| --- " * 9 + "|",
    ]
    for name, hours in sorted(_runs(results)):
        one = course(hours)
        lines.append(
            f"| {name} | {one.hours} | {one.first:.0f} | {one.best:.0f} | {one.last:.0f}"
            f" | {one.failed:.1%} | {one.entropy:.3f} | {one.undone}"
            f" | {'lost' if one.lost else 'kept'} |"
        )
    return lines


def _runs(results: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for run in stored(results).values():
        if run.key.arm == "ours":
            settings = " ".join(run.key.settings) or "the recipe"
            curve: list[Any] = [*run.curve]
            yield f"{run.key.level}, {settings}, seed {run.key.seed}", curve
    for place in (results / "unfinished").glob("*-ours-*/hours.jsonl"):
        lines = place.read_bytes().splitlines()
        yield f"{place.parent.name} (unfinished)", [msgspec.json.decode(line) for line in lines]

"""Improvement of the model by ``babylon demo``, for several seeds.

    python -m benchmarks.demo [--seeds 1 2 3] [--windows 7]

Runs the demo once per seed, each in a new home with a newly made base model. Prints a Markdown
table: P&L of the base, the base after supervised fine-tuning on the best plays, the final policy,
the best scripted rule and the oracle on unseen scenarios; the paired difference of final and base
with its 95 % interval, the share of the gap from base to rule that is closed, and the wall time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import TypedDict

HEADER = (
    "| seed | base | SFT | final | best rule | oracle | difference, 95 % interval | gap | time |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)


class DemoReport(TypedDict):
    """The printed keys of ``babylon demo --json``."""

    seed: int
    pnl_base: float
    pnl_sft: float
    pnl_final: float
    pnl_rule: float
    pnl_oracle: float
    difference: float
    difference_low: float
    difference_high: float
    gap_closed: float


def run(seed: int, windows: int) -> tuple[DemoReport, float]:
    """Run one demo, from making its base model to the final comparison → (report, seconds)."""
    with tempfile.TemporaryDirectory() as home:
        started = time.monotonic()
        options = ["--seed", str(seed), "--windows", str(windows), "--json"]
        finished = subprocess.run(
            [sys.executable, "-m", "babylon", "demo", *options],
            env=os.environ | {"BABYLON_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        report: DemoReport = json.loads(finished.stdout)
        return report, time.monotonic() - started


def row(report: DemoReport, wall_s: float) -> str:
    low, high = report["difference_low"], report["difference_high"]
    return (
        f"| {report['seed']} | {report['pnl_base']:.1f} | {report['pnl_sft']:.1f}"
        f" | {report['pnl_final']:.1f} | {report['pnl_rule']:.1f}"
        f" | {report['pnl_oracle']:.1f} | {report['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
        f" | {report['gap_closed']:.0%} | {wall_s:.0f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--windows", type=int, default=7)
    options = parser.parse_args()
    print("\n".join(HEADER), flush=True)
    for seed in options.seeds:
        print(row(*run(seed, options.windows)), flush=True)


if __name__ == "__main__":
    main()

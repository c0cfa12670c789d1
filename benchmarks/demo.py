"""Does an hour of play become a better model? ``python -m benchmarks.demo --seeds 1 2 3``

Runs ``babylon demo`` once a seed, each in a home of its own and with a base model made afresh, and
prints a Markdown table: P&L of base, final policy and oracle on unseen scenarios, the 95 % interval
of the paired difference, the share of the gap closed, and the time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

HEADER = (
    "| seed | base | final | oracle | difference, 95 % interval | gap closed | time |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def run(seed: int, windows: int) -> dict[str, Any]:
    """One demo, from the making of its base model to the closing comparison."""
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
        report: dict[str, Any] = json.loads(finished.stdout)
        return report | {"wall_s": time.monotonic() - started}


def row(report: dict[str, Any]) -> str:
    low, high = report["difference_low"], report["difference_high"]
    return (
        f"| {report['seed']} | {report['pnl_base']:.1f} | {report['pnl_final']:.1f}"
        f" | {report['pnl_oracle']:.1f} | {report['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
        f" | {report['gap_closed']:.0%} | {report['wall_s']:.0f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--windows", type=int, default=12)
    options = parser.parse_args()
    print("\n".join(HEADER), flush=True)
    for seed in options.seeds:
        print(row(run(seed, options.windows)), flush=True)


if __name__ == "__main__":
    main()

"""A replay as ``babylon dataset replay`` prints it.

The command imports this module when it runs, because the dataset room is slow to load.
"""

from rich.text import Text

from babylon.cli.output import print_table, stderr
from babylon.dataset.replay.comparison import ReplayReport


def print_replay(report: ReplayReport) -> None:
    """Print a row for each scenario, the means, and what was missing or skipped."""
    rows = [
        [
            one.scenario_id,
            one.prices,
            Text(f"{one.recorded_pnl:+,.2f}"),
            Text(f"{one.replayed_pnl:+,.2f}"),
            Text(f"{one.difference:+,.2f}"),
            Text(f"{one.malformed:.0%}"),
        ]
        for one in report.results
    ]
    columns = ["scenario", "prices", "recorded P&L", "replayed P&L", "difference", "malformed"]
    print_table(f"{report.policy} in the place of {report.agent}", columns, rows)
    print(
        f"{len(report.results)} scenarios, mean P&L {report.mean_recorded:+.2f} recorded,"
        f" {report.mean_replayed:+.2f} replayed (USD)"
    )
    for line in report.missing:
        stderr.print(f"not recorded: {line}")
    for skipped in report.skipped:
        stderr.print(f"not replayed: {skipped.reason}")

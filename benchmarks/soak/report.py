"""The report of a soak: promises, recoveries, slopes, and plots."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.soak.faults import TARGETS, Fault
from benchmarks.soak.fleet import Played
from benchmarks.soak.promises import Promise
from benchmarks.soak.watch import Watch, slope

RECOVERY_S = 15.0
_PLOTS = {
    "memory": ("memory ", "MiB"),
    "files": ("open files ", "open files"),
    "disk": ("disk ", "MiB"),
    "prefect": ("rows prefect.", "rows"),
}


def write_report(
    directory: Path,
    minutes: float,
    promises: Sequence[Promise],
    struck: Sequence[Fault],
    played: Played,
    watch: Watch,
    notes: Sequence[str],
) -> Path:
    """Write ``soak.md``, ``soak.json`` and a plot a kind of figure. Return the page."""
    directory.mkdir(parents=True, exist_ok=True)
    failed = sum(1 for _, answered in played.moments if not answered)
    lines = [
        f"# Soak of {minutes:.1f} minutes\n",
        f"{len(played.windows)} simulated hours, {len(played.answered)} answered calls, {failed}"
        f" attempts of agents failed and were repeated, {len(struck)} faults.\n",
        *(f"- {note}" for note in notes),
        "\n## Promises\n",
        "| promise | kept | found |\n| --- | --- | --- |",
        *(f"| {one.text} | {'yes' if one.kept else 'NO'} | {one.found} |" for one in promises),
        "\n## Faults\n",
        "Seconds until every service answered again, and the load of the machine meanwhile.\n",
        "| target | faults | median s | longest s | never back | median load |",
        "| --- | --- | --- | --- | --- | --- |",
        *_recoveries(struck),
        "\n## Slopes\n",
        "Change in an hour over the second half, with a 95 % interval.\n",
        "| figure | last | slope | interval | grows |\n| --- | --- | --- | --- | --- |",
        *_slopes(watch),
        "",
    ]
    for name, (prefix, unit) in _PLOTS.items():
        _plot(directory / f"{name}.png", watch, struck, prefix, unit)
        lines.append(f"![{name}]({name}.png)")
    page = directory / "soak.md"
    page.write_text("\n".join(lines) + "\n")
    (directory / "soak.json").write_text(
        json.dumps(
            {
                "promises": [asdict(one) for one in promises],
                "faults": [asdict(one) for one in struck],
                "samples": [asdict(one) for one in watch.samples],
            }
        )
    )
    return page


def _recoveries(struck: Sequence[Fault]) -> list[str]:
    lines = []
    for target in (*TARGETS, "disk"):
        faults = [one for one in struck if one.target == target]
        back = [one.back_s for one in faults if one.back_s is not None]
        load = median([one.load for one in faults]) if faults else 0.0
        figures = f"{median(back):.1f} | {max(back):.1f}" if back else "– | –"
        lost = len(faults) - len(back)
        lines.append(f"| {target} | {len(faults)} | {figures} | {lost} | {load:.1f} |")
    return lines


def _slopes(watch: Watch) -> list[str]:
    lines = []
    for name in watch.names:
        moments, values = watch.series(name)
        if found := slope(moments, values):
            interval = f"{found.low:+.2f} to {found.high:+.2f}"
            grows = "yes" if found.grows else "no"
            lines.append(
                f"| {name} | {values[-1]:.1f} | {found.middle:+.2f} | {interval} | {grows} |"
            )
    return lines


def _plot(path: Path, watch: Watch, struck: Sequence[Fault], prefix: str, unit: str) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    start = watch.samples[0].at if watch.samples else 0.0
    for name in watch.names:
        if name.startswith(prefix):
            moments, values = watch.series(name)
            axes.plot([(at - start) / 60 for at in moments], values, label=name[len(prefix) :])
    for fault in struck:
        axes.axvline((fault.at - start) / 60, color="0.85", linewidth=0.6, zorder=0)
    axes.set_xlabel("minutes (grey: faults)")
    axes.set_ylabel(unit)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=80)

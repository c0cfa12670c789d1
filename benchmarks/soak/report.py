"""The report of a soak: promises, recoveries, slopes, and plots."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.soak.faults import DISK, RESTARTED, TARGETS, Fault
from benchmarks.soak.fleet import Played
from benchmarks.soak.promises import Promise
from benchmarks.soak.watch import WARM_S, Watch, slope

_PLOTS = {
    "memory": ("memory ", "MiB"),
    "files": ("open files ", "open files"),
    "disk": ("disk ", "MiB"),
    "prefect": ("rows prefect", "rows"),
    "rows": ("rows babylon.", "rows"),
    "clocks": ("clock ", "seconds off"),
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
        f"{len(played.windows)} simulated hours ({len(played.windows) / 24:.1f} days),"
        f" {len(played.answered)} answered calls, {failed} attempts of agents failed and were"
        f" repeated, {sum(one.target in TARGETS for one in struck)} kills.\n",
        *(f"- {note}" for note in notes),
        "\n## Promises\n",
        "| promise | kept | found |\n| --- | --- | --- |",
        *(f"| {one.text} | {'yes' if one.kept else 'NO'} | {one.found} |" for one in promises),
        "\n## Faults\n",
        "Seconds until the service answered again (disk: all services; run: no window is lost, at"
        " the soonest after its lease), while others were struck, and the machine's load.\n",
        "| target | faults | median s | 90 % s | longest s | never back | median load |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *_recoveries(struck),
        "\n## Slopes\n",
        f"Change in an hour with a 95 % interval, {WARM_S / 60:.0f} minutes and more after the last"
        " fault.\n",
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
    for target in (*TARGETS, RESTARTED, DISK):
        faults = [one for one in struck if one.target == target]
        back = [one.back_s for one in faults if one.back_s is not None]
        load = median([one.load for one in faults]) if faults else 0.0
        figures = "– | – | –"
        if back:
            tenth = sorted(back)[int(0.9 * (len(back) - 1) + 0.5)]
            figures = f"{median(back):.1f} | {tenth:.1f} | {max(back):.1f}"
        lost = len(faults) - len(back)
        lines.append(f"| {target} | {len(faults)} | {figures} | {lost} | {load:.1f} |")
    return lines


def _slopes(watch: Watch) -> list[str]:
    lines = []
    for name in watch.names:
        moments, values = watch.judged(name)
        if name.startswith("clock") or not values:
            continue
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
    if math.isfinite(watch.quiet_since):
        axes.axvline((watch.quiet_since - start) / 60, color="0.5", linestyle=":", zorder=0)
    marks = [(one.at - start) / 60 for one in struck if one.target in TARGETS]
    axes.plot(marks, [0.01] * len(marks), "|", color="0.6", transform=axes.get_xaxis_transform())
    axes.set_xlabel("minutes (ticks below: kills; dotted: the faults end)")
    axes.set_ylabel(unit)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=80)

"""Results of runs, a file a level and a line a run, and their tables."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import permutations
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from babylon.evaluation.arena.confidence import mean_interval
from babylon.evaluation.arena.play import Floats
from babylon.evaluation.experiment.difference import student


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """The choices that decide a run's figures. ``settings``: those changed by ``--set``."""

    level: str
    arm: str
    seed: int
    hours: int
    agents: int
    worlds: int
    base: str
    settings: tuple[str, ...] = ()
    first: int = 0

    @property
    def last(self) -> int:
        """The last hour."""
        return self.first + self.hours - 1

    @property
    def name(self) -> str:
        digest = blake2b(repr(self).encode(), digest_size=4).hexdigest()
        return f"{self.level}-{self.arm}-seed{self.seed}-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The end of a run on the level's unseen worlds: mean P&L of policy, base and best rule.

    ``gain``: the paired difference to the base model with its 95 % interval; ``beside``: to the
    rule. ``curve``: rows of the hours, or (decisions, P&L). ``by_world``: the policy's P&L in each
    of the worlds. ``new_words``: mean P&L of policy and base in these worlds with headlines that
    nobody has been shown, if that was asked for.
    """

    key: RunKey
    pnl: float
    malformed: float
    base_pnl: float
    rule: str
    rule_pnl: float
    gain: tuple[float, float, float]
    beside: tuple[float, float, float]
    decisions: int
    cpu_s: float
    curve: tuple[object, ...]
    by_world: tuple[float, ...]
    new_words: tuple[float, float] | None = None


def stored(directory: Path) -> dict[RunKey, RunResult]:
    """Return the results of a directory, level by level in the order of their ends."""
    files = sorted(directory.glob("L*.jsonl"))
    lines = (line for file in files for line in file.read_bytes().splitlines())
    results = (msgspec.json.decode(line, type=RunResult) for line in lines)
    return {result.key: result for result in results}


def store(directory: Path, result: RunResult) -> None:
    """Append a result to its level's file."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{result.key.level}.jsonl").open("ab") as lines:
        lines.write(msgspec.json.encode(result) + b"\n")


def table(results: Iterable[RunResult]) -> list[str]:
    """Return a Markdown table: one row for each level, arm and setting, over its seeds.

    Brackets: of several seeds the lowest and highest, of one its 95 % interval over worlds.
    """
    groups: dict[tuple[str, str, int, int, tuple[str, ...]], list[RunResult]] = {}
    for one in results:
        key = one.key
        group = (key.level, key.arm, key.hours, key.agents, key.settings)
        groups.setdefault(group, []).append(one)
    lines = [
        "| level | arm | hours × agents | seeds | P&L | over the base | malformed | CPU s | base |"
        " best rule | new words: P&L, base |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (level, arm, hours, agents, changed), runs in sorted(groups.items(), key=str):
        gains = [run.gain[0] for run in runs]
        low, high = (min(gains), max(gains)) if len(runs) > 1 else runs[0].gain[1:]
        name = " ".join([arm, *changed])
        rule = f"{runs[0].rule} {runs[0].rule_pnl:.0f}"
        lines.append(
            f"| {level} | {name} | {hours} × {agents} | {len(runs)}"
            f" | {fmean(run.pnl for run in runs):.0f}"
            f" | {fmean(gains):+.0f} [{low:+.0f}, {high:+.0f}]"
            f" | {fmean(run.malformed for run in runs):.1%} | {fmean(r.cpu_s for r in runs):.0f}"
            f" | {fmean(run.base_pnl for run in runs):.0f} | {rule} | {_new_words(runs)} |"
        )
    return lines


def _new_words(runs: Iterable[RunResult]) -> str:
    known = [run.new_words for run in runs if run.new_words is not None]
    return ", ".join(f"{fmean(values):.0f}" for values in zip(*known, strict=True))


def differences(results: Iterable[RunResult]) -> list[str]:
    """Return a Markdown table of what an arm earns more than another on the same seeds and worlds.

    The first interval is over worlds: for these seeds. The second, Student's t of the seeds' means
    behind it, is for another seed.
    """
    plays: dict[tuple[str, str, str], dict[str, RunResult]] = {}
    for run in results:
        plays.setdefault(_play(run), {})[" ".join([run.key.arm, *run.key.settings])] = run
    groups: dict[tuple[str, ...], list[Floats]] = {}
    for (level, hours, _), arms in plays.items():
        for one, other in permutations(arms, 2):
            by_world = np.subtract(arms[one].by_world, arms[other].by_world)
            groups.setdefault((level, hours, one, other), []).append(by_world)
    lines = [
        "| level | hours × agents | arm | over | seeds | over worlds | over seeds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for names, by_world in sorted(groups.items()):
        mean = mean_interval(np.mean(by_world, axis=0))
        if mean.mean >= 0:  # the other order says the same
            lines.append(
                f"| {' | '.join(names)} | {len(by_world)}"
                f" | {mean.mean:+.0f} [{mean.low:+.0f}, {mean.high:+.0f}]"
                f" | {_over_seeds([float(one.mean()) for one in by_world])} |"
            )
    return lines


def _over_seeds(means: Sequence[float]) -> str:
    listed = ", ".join(f"{mean:+.0f}" for mean in means)
    if len(means) < 2:
        return listed
    half = student(1.96, len(means) - 1) * np.std(means, ddof=1) / math.sqrt(len(means))
    return f"[{np.mean(means) - half:+.0f}, {np.mean(means) + half:+.0f}] ({listed})"


def _play(run: RunResult) -> tuple[str, str, str]:
    """What two arms must share to be compared: level, hours and all else.

    Base models of one name may differ, if other processors made them. Then they earn other sums.
    """
    key = run.key
    hours, base = f"{key.hours} × {key.agents}", f"{key.base} {run.base_pnl:.2f}"
    return key.level, hours, f"{key.seed} {key.first} {key.worlds} {base}"

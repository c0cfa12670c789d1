"""Ranking quality, honesty and cost of the scorers, compared with ART's RULER.

    python -m benchmarks.judge [--json] [--sizes 4 real] [--conditions noise] [--scorers ruler]
    python -m benchmarks.judge --blind [--json]         judges that tell nothing: share taught

Prints a Markdown table on stderr while it runs, and the targets (with ``--json`` also all rows) as
JSON on stdout. The judge has known noise and biases (``benchmarks.loopback_judge``). Windows are
played in the simulator (``benchmarks.judge_windows``), or hold the real rows of ``--rows``, which
are judged again and again with new noise and in another order. All scorers get the same windows
and seeds. ``art-twice`` asks ART's RULER in two orders, one the reverse of the other, and averages.

- tau: Kendall's tau-b between scores and true profit, mean over windows
- adv: correlation of leave-one-out advantages with those of the true profit, over all windows
- cover: share of true values within the 50 % interval, after the first ``WARM`` windows, with the
  half-width of its own 95 % interval by windows: the values of one share their errors. What a
  judge's word is worth is learned from the windows before. A true value is the score that the judge
  gives that profit on average over its errors. An interval that ends at 0 or 1 holds all on that
  side: true values are compared around the mean, which may differ from theirs
- tied: ``adv`` if trajectories whose 50 % intervals overlap had got equal scores
- tokens: of prompts and replies, with repetitions, repairs and canaries; a window without scores
  has tau 0
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import msgspec
import numpy as np

from babylon.core.errors import BabylonError
from babylon.scoring.judge.canary_results import CanaryResult
from babylon.scoring.judge.judge_client import JudgeClient
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import JudgeConfig, load_rubric
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from babylon.scoring.judge.validity import WINDOWS as HISTORY
from babylon.scoring.judge.validity import (
    JudgedGroup,
    evidence,
    learn,
    log_evidence,
    most_evidence,
)
from babylon.scoring.rewards.art_ruler import scores_by_art
from babylon.scoring.rewards.heuristic import heuristic
from babylon.scoring.scorer import Score
from benchmarks.judge_windows import KnownWindow, known_window, recorded_window
from benchmarks.loopback_judge import LoopbackJudge, Mind, mean_score

MODEL = "loopback"
RUBRIC = load_rubric("trading-v1")
REAL = "real"
WINDOWS: dict[str, int] = {"4": 40, "8": 30, "24": 8, REAL: 168}  # size → number of windows
WARM = 10
PROVED = 20.0
FAULTS = {
    **{"malformed": 0.05, "fenced": 0.05, "missing_id": 0.03, "duplicate_id": 0.03},
    **{"out_of_range": 0.03, "rank_order": 0.1, "rate_limit": 0.05, "server_error": 0.05},
}
CONDITIONS: dict[str, Mind] = {
    "zero noise": Mind(),
    "noise": Mind(noise=0.2),
    "position": Mind(noise=0.2, position_bias=0.5),
    "first": Mind(noise=0.2, first_bias=0.5),
    "persistent 50 %": Mind(noise=0.2, persistent=0.5),
    "persistent 80 %": Mind(noise=0.2, persistent=0.8),
    "heavy tails": Mind(noise=0.2, tails=2.0),
    "verbosity": Mind(noise=0.2, verbosity_bias=0.5),
    "faults": Mind(noise=0.2, faults=FAULTS, retry_after_s=0.01),
    "content filter": Mind(noise=0.2, refuses="AGENT-0", refusal="content_filter"),
}
BLIND: dict[str, Mind] = {
    "random": Mind(noise=0.3, blind=True),
    "constant": Mind(blind=True),
    "position only": Mind(noise=0.05, position_bias=0.6, first_bias=0.2, blind=True),
    "other taste": Mind(noise=0.3, persistent=0.9, blind=True),
}
OURS = "ruler"
SCORERS = ("art-ruler", "art-twice", OURS, "heuristic")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """A scorer's result on one window. ``failure`` is the reason of missing scores (tau 0).

    ``inside`` are the true values within their intervals, of ``intervals``. ``advantages`` are
    pairs of a score and a true value, both centred; ``tied`` those with ties. ``taught``: the gate
    let the scores pass.
    """

    scorer: str
    condition: str
    size: str
    seed: int
    tau: float
    calls: int
    tokens: int
    cached: int = 0
    inside: int = 0
    intervals: int = 0
    advantages: tuple[tuple[float, float], ...] = ()
    tied: tuple[tuple[float, float], ...] = ()
    taught: bool = True
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scorer's means over the windows of one size under one condition.

    ``gain`` is tau minus that of ``art-twice`` on the same windows, with the half-width of its 95 %
    interval. ``coverage_half_width`` is that of ``coverage``. ``tokens_ratio`` is tokens over those
    of one request of ART's. ``gain`` and the ratio are None if the other did not run.
    """

    condition: str
    size: str
    scorer: str
    windows: int
    failed: int
    tau: float
    advantage: float
    tied: float
    coverage: float | None
    coverage_half_width: float | None
    intervals: int
    calls: float
    tokens: float
    cached: float
    taught: float
    gain: float | None
    gain_half_width: float | None
    tokens_ratio: float | None


@dataclass(slots=True)
class Ours:
    """Our judge with what it learned from the windows before."""

    history: list[JudgedGroup] = field(default_factory=list)
    canaries: list[CanaryResult] = field(default_factory=list)
    path: list[tuple[float, ...]] = field(default_factory=list)
    windows: int = 0

    async def judge(self, window: KnownWindow, base_url: str) -> tuple[dict[str, Score], bool]:
        """Return the scores, and whether the gate lets them pass."""
        config = JudgeConfig(rubric=RUBRIC)
        trust = learn(self.history, self.canaries)
        async with JudgeClient(model=MODEL, base_url=base_url) as client:
            judgments = await judge_window(
                client,
                window.judged,
                window.truth,
                config,
                ledger=MemoryJudgments(),
                trust=trust,
            )
        self.history = [*self.history, *judgments.groups][-HISTORY:]
        self.canaries = [*self.canaries, *judgments.canaries][-HISTORY:]
        self.path.append(log_evidence(judgments.groups))
        self.windows += 1
        found = {
            one.trajectory_id: Score(one.score, low=one.low, high=one.high)
            for one in judgments.scores
        }
        return found, min(evidence(self.history, self.canaries), most_evidence(self.path)) >= PROVED


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b: concordant minus discordant pairs over the geometric mean of untied pairs.

    0 if either sequence is constant.
    """
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    signs_a, signs_b = np.sign(a[:, None] - a), np.sign(b[:, None] - b)
    untied = float(np.abs(signs_a).sum()) * float(np.abs(signs_b).sum())
    return float((signs_a * signs_b).sum()) / sqrt(untied) if untied else 0.0


async def by_art(window: KnownWindow, base_url: str, *, twice: bool) -> dict[str, Score]:
    """Score by ART's RULER with our rubric; its own rubric rewards reaching a goal sooner."""
    ordered = [judged.trajectory for judged in window.judged]
    sums: dict[str, list[float]] = {}
    for trajectories in (ordered, ordered[::-1]) if twice else (ordered,):
        scores = await scores_by_art(
            trajectories, model=MODEL, base_url=base_url, api_key="none", rubric=RUBRIC.text
        )
        for trajectory, score in zip(trajectories, scores, strict=True):
            if isinstance(score, Score):
                sums.setdefault(trajectory.trajectory_id, []).append(score.value)
    return {name: Score(fmean(values)) for name, values in sums.items()}


def known(size: str, seed: int, rows: Path | None) -> KnownWindow:
    """Return a window of the simulator, or the recorded one in a random order."""
    if size != REAL:
        return known_window(int(size), seed)
    assert rows is not None
    window = recorded_window(rows)
    order = Random(seed).sample(range(len(window.judged)), len(window.judged))
    return replace(
        window,
        judged=tuple(window.judged[item] for item in order),
        profit_usd=tuple(window.profit_usd[item] for item in order),
    )


async def judge_once(
    scorer: str,
    condition: str,
    size: str,
    seed: int,
    *,
    ours: Ours | None = None,
    rows: Path | None = None,
) -> WindowResult:
    """Score one window with a new judge. ``ours`` keeps what was learned from windows before."""
    window = known(size, seed, rows)
    low, high = min(window.profit_usd), max(window.profit_usd)
    mind = replace((CONDITIONS | BLIND)[condition], seed=seed, scale=(low, high))
    if mind.refuses:
        window = with_refused(window, mind.refuses)
    found: dict[str, Score] = {}
    taught, failure = True, ""
    ours = ours or (Ours() if scorer == OURS else None)
    learned = ours is not None and ours.windows >= WARM
    async with LoopbackJudge(mind) as judge:
        try:
            if ours is not None:
                found, taught = await ours.judge(window, judge.base_url)
            elif scorer == "heuristic":
                trajectories = [judged.trajectory for judged in window.judged]
                scores = zip(trajectories, heuristic(trajectories), strict=True)
                found = {trajectory.trajectory_id: score for trajectory, score in scores}
            else:
                found = await by_art(window, judge.base_url, twice=scorer == "art-twice")
        except BabylonError as error:
            failure = str(error)
        except Exception as error:  # ART does not catch errors of litellm and pydantic
            if not scorer.startswith("art"):
                raise
            failure = repr(error)
    names = [judged.trajectory.trajectory_id for judged in window.judged]
    profits = {name: p for name, p in zip(names, window.profit_usd, strict=True) if name in found}
    scores_of = {name: found[name].value for name in profits}
    truth = true_scores(profits, mind)
    errors = {name: found[name].value - fmean(scores_of.values()) - truth[name] for name in truth}
    inside = [
        name
        for name, score in found.items()
        if score.low is not None
        and score.high is not None
        and (score.low <= 0.0 or score.low - score.value <= -errors[name])
        and (score.high >= 1.0 or -errors[name] <= score.high - score.value)
    ]
    bounded = learned and any(score.low is not None for score in found.values())
    middle = fmean(profits.values()) if profits else 0.0
    return WindowResult(
        scorer=scorer,
        condition=condition,
        size=size,
        seed=seed,
        tau=kendall_tau([*scores_of.values()], [*profits.values()]) if found else 0.0,
        calls=judge.requests,
        tokens=judge.tokens,
        cached=judge.cached_tokens,
        inside=len(inside) if bounded else 0,
        intervals=len(found) if bounded else 0,
        advantages=tuple(
            (scores_of[name] - fmean(scores_of.values()), (profits[name] - middle) / (high - low))
            for name in profits
        ),
        tied=tuple(
            (tied - fmean(scores_of.values()), (profits[name] - middle) / (high - low))
            for name, tied in with_ties(found).items()
        ),
        taught=taught,
        failure=failure,
    )


def with_ties(found: Mapping[str, Score]) -> dict[str, float]:
    """Return the scores with one value, the mean, for neighbours whose intervals overlap."""
    runs: list[list[str]] = []
    top = -1.0
    for name in sorted(found, key=lambda name: found[name].value):
        low, high = found[name].low, found[name].high
        if runs and low is not None and low <= top:
            runs[-1].append(name)
        else:
            runs.append([name])
        top = max(top, high if high is not None else -1.0)
    means = {n: fmean(found[one].value for one in run) for run in runs for n in run}
    return {name: means[name] for name in found}


def with_refused(window: KnownWindow, text: str) -> KnownWindow:
    """Return the window with a text in the last reply of one trajectory."""
    first, *others = window.judged
    trajectory = first.trajectory
    *calls, last = trajectory.calls
    said = f"{text} {last.response}"
    trajectory = msgspec.structs.replace(
        trajectory, calls=(*calls, msgspec.structs.replace(last, response=said))
    )
    *steps, end = first.steps
    end = {**end, "action": {**end["action"], "error": text, "success": False}}
    return replace(
        window, judged=(replace(first, trajectory=trajectory, steps=(*steps, end)), *others)
    )


def true_scores(profits: Mapping[str, float], mind: Mind) -> dict[str, float]:
    """Return the centred scores that the loopback judge gives on average over its errors."""
    exact = {name: mean_score(mind, profit) for name, profit in profits.items()}
    middle = fmean(exact.values()) if exact else 0.0
    return {name: value - middle for name, value in exact.items()}


def summarise(
    results: Sequence[WindowResult],
    once: Sequence[WindowResult] = (),
    twice: Sequence[WindowResult] = (),
) -> Row:
    """Return a scorer's row, compared with ART's results on the same windows if there are any."""
    first = results[0]
    gains = [ours.tau - theirs.tau for ours, theirs in zip(results, twice, strict=bool(twice))]
    spread = stdev(gains) if len(gains) > 1 else 0.0
    tokens = fmean(result.tokens for result in results)
    intervals = sum(result.intervals for result in results)
    shares = [result.inside / result.intervals for result in results if result.intervals]
    return Row(
        condition=first.condition,
        size=first.size,
        scorer=first.scorer,
        windows=len(results),
        failed=sum(bool(result.failure) for result in results),
        tau=fmean(result.tau for result in results),
        advantage=_cosine([pair for result in results for pair in result.advantages]),
        tied=_cosine([pair for result in results for pair in result.tied]),
        coverage=sum(result.inside for result in results) / intervals if intervals else None,
        coverage_half_width=(1.96 * stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else None),
        intervals=intervals,
        calls=fmean(result.calls for result in results),
        tokens=tokens,
        cached=fmean(result.cached for result in results),
        taught=fmean(result.taught for result in results),
        gain=fmean(gains) if gains else None,
        gain_half_width=1.96 * spread / sqrt(len(gains)) if gains else None,
        tokens_ratio=tokens / fmean(result.tokens for result in once) if once else None,
    )


def _cosine(pairs: Sequence[tuple[float, float]]) -> float:
    both = np.array(pairs).reshape(-1, 2)
    norms = np.linalg.norm(both, axis=0)
    return float(both[:, 0] @ both[:, 1] / norms.prod()) if norms.all() else 0.0


async def measure(
    scorers: Sequence[str],
    conditions: Sequence[str],
    windows: Mapping[str, int],
    rows: Path | None = None,
) -> list[Row]:
    """Measure all rows and print each on stderr."""
    table = []
    for condition in conditions:
        for size, count in windows.items():
            arts: dict[str, list[WindowResult]] = {}
            for scorer in scorers:
                ours = Ours() if scorer == OURS else None
                once = partial(judge_once, scorer, condition, size, ours=ours, rows=rows)
                results = [await once(seed) for seed in range(count)]
                arts |= {scorer: results} if scorer.startswith("art") else {}
                row = summarise(results, arts.get("art-ruler", ()), arts.get("art-twice", ()))
                table.append(row)
                print(as_line(row), file=sys.stderr, flush=True)
    return table


HEADER = (
    "| judge | window | scorer | tau | more than ART twice, 95 % | adv | tied | cover | failed"
    " | calls | tokens | by ART once | cached | taught |\n|" + " --- |" * 14
)


def as_line(row: Row) -> str:
    """Return the row in Markdown."""
    gain = "" if row.gain is None else f"{row.gain:+.2f} ± {row.gain_half_width:.2f}"
    ratio = "" if row.tokens_ratio is None else f"{row.tokens_ratio:.2f}"
    cover = ""
    if row.coverage is not None:
        cover = f"{100 * row.coverage:.0f} ± {100 * (row.coverage_half_width or 0):.0f} %"
    return (
        f"| {row.condition} | {row.size} | {row.scorer} | {row.tau:.3f} | {gain}"
        f" | {row.advantage:.3f} | {row.tied:.3f} | {cover} | {row.failed}/{row.windows}"
        f" | {row.calls:.1f} | {row.tokens:.0f} | {ratio} | {row.cached / max(row.tokens, 1):.0%}"
        f" | {row.taught:.0%} |"
    )


def targets(table: Sequence[Row]) -> dict[str, bool | None]:
    """Return whether ours reaches its targets; None if the needed rows are missing."""
    ruler = [row for row in table if row.scorer == OURS]
    beside = [row for row in ruler if row.gain is not None]
    reached: dict[str, list[bool]] = {
        "zero_noise_tau_is_1": [row.tau > 0.999 for row in ruler if row.condition == "zero noise"],
        "not_below_art_twice": [
            (row.gain or 0) + (row.gain_half_width or 0) >= 0 for row in beside
        ],
        "independent_gain_at_least_0.05": [
            (row.gain or 0) >= 0.05
            for row in beside
            if row.condition in ("noise", "position", "first")
        ],
        "tokens_at_most_1.6_times": [
            row.tokens_ratio <= 1.6 for row in ruler if row.tokens_ratio is not None
        ],
        "coverage_45_to_55": [
            abs(row.coverage - 0.5) <= 0.05 + row.coverage_half_width
            for row in table
            if row.coverage is not None
            and row.coverage_half_width is not None
            and row.condition not in ("zero noise", *BLIND)
            # The same five texts come again and again, so their lengths are one error.
            and (row.condition, row.size) != ("verbosity", REAL)
        ],
        "blind_taught_at_most_5_%": [row.taught <= 0.05 for row in table if row.condition in BLIND],
    }
    return {name: all(found) if found else None for name, found in reached.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=WINDOWS, default=[*WINDOWS])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=[*CONDITIONS])
    parser.add_argument("--scorers", nargs="+", choices=SCORERS, default=[*SCORERS])
    parser.add_argument("--rows", type=Path, default=Path("tests/data/babylon"))
    parser.add_argument("--blind", action="store_true", help="only uninformed judges")
    parser.add_argument("--times", type=float, default=1, help="multiply the number of windows")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    windows = {size: round(WINDOWS[size] * options.times) for size in options.sizes}
    if not (options.rows / "trajectories.jsonl").exists():
        print(f"no rows in {options.rows}: only windows of the simulator", file=sys.stderr)
        windows.pop(REAL, None)
    scorers = (OURS,) if options.blind else options.scorers
    conditions = [*BLIND] if options.blind else options.conditions
    print(HEADER, file=sys.stderr)
    table = asyncio.run(measure(scorers, conditions, windows, options.rows))
    report = {"targets": targets(table), "rows": [asdict(row) for row in table]}
    print(json.dumps(report) if options.json else json.dumps(report["targets"]))


if __name__ == "__main__":
    main()

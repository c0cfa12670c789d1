"""Ranking quality and cost of the scorers, compared with ART's RULER.

    python -m benchmarks.judge [--json] [--sizes 4 24] [--conditions noise] [--scorers ruler]

Prints a Markdown table on stderr while it runs: Kendall's tau-b between scores and truth (mean over
windows), calls, tokens and cost of each scorer. Prints the targets (with ``--json`` also all rows)
as JSON on stdout. The windows have a known ranking (``benchmarks.judge_windows``), and the judge
has known noise and biases (``benchmarks.loopback_judge``). All scorers get the same windows and
seeds. A window that a scorer cannot score counts as a failure with tau 0. Tokens include repeated
and repaired requests. Costs use the same price for all scorers.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from babylon.core.errors import BabylonError
from babylon.scoring.judge.judge_client import JudgeClient
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import JudgeConfig, Method, load_rubric
from babylon.scoring.rewards.art_ruler import scores_by_art
from babylon.scoring.rewards.heuristic import heuristic
from benchmarks.judge_windows import KnownWindow, MemoryJudgments, known_window
from benchmarks.loopback_judge import LoopbackJudge, Mind

MODEL = "loopback"
RUBRIC = load_rubric("trading-v1")
PROMPT_USD, COMPLETION_USD = 1.0, 4.0  # per million tokens
WINDOWS = {4: 40, 8: 20, 24: 8, 64: 4}  # size → number of windows
FAULTS = {
    **{"malformed": 0.05, "fenced": 0.05, "missing_id": 0.03, "duplicate_id": 0.03},
    **{"out_of_range": 0.03, "rank_order": 0.1, "rate_limit": 0.05, "server_error": 0.05},
}
CONDITIONS: dict[str, Mind] = {
    "zero noise": Mind(),
    "noise": Mind(noise=0.2),
    "noise + position": Mind(noise=0.2, position_bias=0.5),
    "noise + first": Mind(noise=0.2, first_bias=0.5),
    "noise + verbosity": Mind(noise=0.2, verbosity_bias=0.5),
    "noise + position + curve": Mind(noise=0.2, position_bias=0.5, curve=1.0),
    "noise + faults": Mind(noise=0.2, faults=FAULTS, retry_after_s=0.1),
}
COMPARED = ("art-ruler", "ruler")  # measured always; the others only in small windows
ALL_COMPARED, ALL_UP_TO = ("zero noise", "noise + position"), 24
Scores = Sequence[float]
Scorer = Callable[[KnownWindow, str], Awaitable[Scores]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """A scorer's result on one window. ``failure`` is the reason of missing scores (tau 0)."""

    scorer: str
    condition: str
    size: int
    seed: int
    tau: float
    calls: int
    tokens: int
    usd: float
    wall_s: float
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scorer's means over the windows of one size under one condition.

    ``gain`` is tau minus ART's on the same windows, with the half-width of its 95 % interval.
    ``tokens_ratio`` is tokens over ART's. Both are None if ART did not run.
    """

    condition: str
    size: int
    scorer: str
    windows: int
    failed: int
    tau: float
    calls: float
    tokens: float
    usd: float
    gain: float | None
    gain_half_width: float | None
    tokens_ratio: float | None


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b: concordant minus discordant pairs over the geometric mean of untied pairs.

    0 if either sequence is constant.
    """
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    signs_a, signs_b = np.sign(a[:, None] - a), np.sign(b[:, None] - b)
    untied = float(np.abs(signs_a).sum()) * float(np.abs(signs_b).sum())
    return float((signs_a * signs_b).sum()) / sqrt(untied) if untied else 0.0


def judged_by(method: Method) -> Scorer:
    """Return our judge with one of its methods and the default settings."""

    async def scores(window: KnownWindow, base_url: str) -> Scores:
        config = JudgeConfig(method=method, rubric=RUBRIC)
        async with JudgeClient(model=MODEL, base_url=base_url) as client:
            judgments = await judge_window(
                client, window.judged, window.truth, config, ledger=MemoryJudgments()
            )
        return [judged.score for judged in judgments.scores]

    return scores


async def _heuristic(window: KnownWindow, base_url: str) -> Scores:
    return [score.value for score in heuristic([judged.trajectory for judged in window.judged])]


async def _art_ruler(window: KnownWindow, base_url: str) -> Scores:
    """Score by ART's RULER with our rubric; its own rubric rewards reaching a goal sooner."""
    scores = await scores_by_art(
        [judged.trajectory for judged in window.judged],
        model=MODEL,
        base_url=base_url,
        api_key="none",
        rubric=RUBRIC.text,
    )
    return [score.value for score in scores]


SCORERS: dict[str, Scorer] = {
    "art-ruler": _art_ruler,
    "ruler": judged_by("ruler"),
    "preference": judged_by("preference"),
    "regression": judged_by("regression"),
    "heuristic": _heuristic,
}


async def judge_once(scorer: str, condition: str, size: int, seed: int) -> WindowResult:
    """Score one window with a new judge."""
    window = known_window(size, seed)
    scale = (min(window.profit_usd), max(window.profit_usd))
    mind = replace(CONDITIONS[condition], seed=seed, scale=scale)
    started = time.monotonic()
    tau, failure = 0.0, ""
    async with LoopbackJudge(mind) as judge:
        try:
            tau = kendall_tau(await SCORERS[scorer](window, judge.base_url), window.profit_usd)
        except BabylonError as error:
            failure = str(error)
        except Exception as error:  # ART does not catch errors of litellm and pydantic
            if scorer != "art-ruler":
                raise
            failure = repr(error)
    return WindowResult(
        scorer=scorer,
        condition=condition,
        size=size,
        seed=seed,
        tau=tau,
        calls=judge.requests,
        tokens=judge.tokens,
        usd=(judge.prompt_tokens * PROMPT_USD + judge.completion_tokens * COMPLETION_USD) / 1e6,
        wall_s=time.monotonic() - started,
        failure=failure,
    )


def summarise(results: Sequence[WindowResult], arts: Sequence[WindowResult]) -> Row:
    """Return a scorer's row, compared with ART's results on the same windows if there are any."""
    first = results[0]
    gains = [ours.tau - theirs.tau for ours, theirs in zip(results, arts, strict=bool(arts))]
    spread = stdev(gains) if len(gains) > 1 else 0.0
    tokens = fmean(result.tokens for result in results)
    return Row(
        condition=first.condition,
        size=first.size,
        scorer=first.scorer,
        windows=len(results),
        failed=sum(bool(result.failure) for result in results),
        tau=fmean(result.tau for result in results),
        calls=fmean(result.calls for result in results),
        tokens=tokens,
        usd=fmean(result.usd for result in results),
        gain=fmean(gains) if gains else None,
        gain_half_width=1.96 * spread / sqrt(len(gains)) if gains else None,
        tokens_ratio=tokens / fmean(result.tokens for result in arts) if arts else None,
    )


async def measure(
    scorers: Sequence[str] | None, conditions: Sequence[str], windows: Mapping[int, int]
) -> list[Row]:
    """Measure all rows and print each on stderr.

    ``scorers`` None: all scorers under the conditions ``ALL_COMPARED`` with windows up to
    ``ALL_UP_TO``, elsewhere only those in ``COMPARED``.
    """
    rows = []
    for condition in conditions:
        for size, count in windows.items():
            arts: list[WindowResult] = []
            affordable = condition in ALL_COMPARED and size <= ALL_UP_TO
            for scorer in scorers or (SCORERS if affordable else COMPARED):
                results = [await judge_once(scorer, condition, size, seed) for seed in range(count)]
                arts = results if scorer == "art-ruler" else arts
                rows.append(summarise(results, arts))
                print(as_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


HEADER = (
    "| judge | window | scorer | tau | more than ART's, 95 % | failed | calls | tokens | by ART's"
    " | cost |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def as_line(row: Row) -> str:
    """Return the row in Markdown."""
    beside = row.gain is not None and row.scorer != "art-ruler"
    gain = f"{row.gain:+.2f} ± {row.gain_half_width:.2f}" if beside else ""
    ratio = f"{row.tokens_ratio:.2f}" if beside else ""
    return (
        f"| {row.condition} | {row.size} | {row.scorer} | {row.tau:.3f} | {gain}"
        f" | {row.failed}/{row.windows} | {row.calls:.1f} | {row.tokens:.0f} | {ratio}"
        f" | ${row.usd:.4f} |"
    )


def targets(rows: Sequence[Row]) -> dict[str, bool | None]:
    """Return whether ``ruler`` reaches its targets; None if the needed rows are missing."""
    ours = [row for row in rows if row.scorer == "ruler"]
    exact = [row.tau for row in ours if row.condition == "zero noise"]
    biased = [row for row in ours if row.condition == "noise + position" and row.gain is not None]
    return {
        "zero_noise_tau_is_1": all(tau == 1.0 for tau in exact) if exact else None,
        "gain_at_least_0.15": all((row.gain or 0) >= 0.15 for row in biased) if biased else None,
        "tokens_at_most_1.6_times": (
            all((row.tokens_ratio or 0) <= 1.6 for row in biased) if biased else None
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", choices=WINDOWS, default=[*WINDOWS])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=[*CONDITIONS])
    parser.add_argument("--scorers", nargs="+", choices=SCORERS)
    parser.add_argument("--times", type=int, default=1, help="multiply the number of windows")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    windows = {size: WINDOWS[size] * options.times for size in options.sizes}
    print(HEADER, file=sys.stderr)
    rows = asyncio.run(measure(options.scorers, options.conditions, windows))
    report = {"targets": targets(rows), "rows": [asdict(row) for row in rows]}
    print(json.dumps(report) if options.json else json.dumps(report["targets"]))


if __name__ == "__main__":
    main()

"""The plays of an experiment that count, and the result of each."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean

import msgspec

from babylon.quality.correctness import window_pnl_usd
from babylon.quality.decode import GameMetrics, GameStep, RejectedError, decode
from babylon.quality.traded import MOST
from babylon.store.connection import Connection
from babylon.store.experiments import Play, steps_of

START_BALANCE_USD = 1000.0
HEAVY_LOSS = 0.1  # of the balance
_AT_A_TIME = 64  # plays whose steps are read: each may have 32 MiB


class Counts(msgspec.Struct, frozen=True, rename="camel"):
    """The counts in a row's ``metricsJson``."""

    final_pnl: float | None = msgspec.field(name="finalPnL", default=None)
    episode_length: int = 0
    error_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayResult:
    """A play's ``start``, P&L and opening balance in USD, ``lost`` (1.0 for a heavy loss) and share
    of failed actions. A task without a balance has 0."""

    trajectory_id: str
    unit: str
    stage: int
    start: datetime
    pnl_usd: float
    balance_usd: float
    lost: float
    failed: float | None


def finished(plays: Iterable[Play], before: datetime) -> tuple[list[Play], Counter[str]]:
    """Select the plays that count → (plays, number of others by reason).

    A play counts if its window is over (it started ``before``) and all its calls are of one arm of
    the experiment.
    """
    counting, excluded = [], Counter[str]()
    for play in plays:
        if play.mixed:
            excluded["mixed arms, or partly outside of the experiment"] += 1
        elif play.evaluation:
            excluded["evaluation"] += 1
        elif play.start is None:
            excluded["not finished or never written"] += 1
        elif play.start >= before:
            excluded["window not over"] += 1
        else:
            counting.append(play)
    return counting, excluded


async def results(game: Connection, plays: Sequence[Play]) -> tuple[list[PlayResult], Counter[str]]:
    """Compute the plays' results → (results, number of plays without P&L).

    The P&L comes from columns and the first step's opening state. All steps are read only for plays
    without them, because steps are large.
    """
    counts = [_counts(play.metrics_json) for play in plays]
    pnl: list[float | None] = []
    for play, counted in zip(plays, counts, strict=True):
        final = counted.final_pnl if play.final_pnl is None else play.final_pnl
        known = final is not None and play.opening_pnl is not None
        pnl.append(final - play.opening_pnl if known else None)  # type: ignore[operator]
    deep = [number for number, value in enumerate(pnl) if value is None]
    for start in range(0, len(deep), _AT_A_TIME):
        part = deep[start : start + _AT_A_TIME]
        steps = await steps_of(game, [plays[number].trajectory_id for number in part])
        for number in part:
            play = plays[number]
            pnl[number] = _from_steps(steps.get(play.trajectory_id, ""), play, counts[number])
    found, excluded = [], Counter[str]()
    for play, counted, value in zip(plays, counts, pnl, strict=True):
        if value is None or not abs(value) <= MOST:
            excluded["no P&L"] += 1
            continue
        assert play.start is not None  # unwritten plays have no P&L either
        balance = max(play.opening_balance or 0.0, 0.0)
        found.append(
            PlayResult(
                trajectory_id=play.trajectory_id,
                unit=play.unit,
                stage=play.stage,
                start=play.start,
                pnl_usd=value,
                balance_usd=balance,
                lost=float(value < -HEAVY_LOSS * max(balance, START_BALANCE_USD)),
                failed=_failed(counted),
            )
        )
    return found, excluded


def means(results: Iterable[PlayResult]) -> dict[str, float]:
    """Return each agent's mean P&L."""
    of_unit = defaultdict(list)
    for result in results:
        of_unit[result.unit].append(result.pnl_usd)
    return {unit: fmean(values) for unit, values in of_unit.items()}


def _counts(text: str | None) -> Counts:
    """Decode ``metricsJson``; without any counts if it is malformed, because it is optional."""
    try:
        return msgspec.json.decode(text or "{}", type=Counts)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return Counts()


def _from_steps(text: str, play: Play, counts: Counts) -> float | None:
    try:
        steps = decode(text, tuple[GameStep, ...], "stepsJson")
        if not steps:
            return None
        return window_pnl_usd(steps, GameMetrics(final_pnl=counts.final_pnl), play.final_pnl)
    except RejectedError:  # counted as a play without P&L
        return None


def _failed(counts: Counts) -> float | None:
    if counts.error_count is None or counts.episode_length < 1:
        return None
    return min(max(counts.error_count / counts.episode_length, 0.0), 1.0)

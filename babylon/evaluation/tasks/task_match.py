"""A match on a task: both policies play the same worlds until the bets on the scores decide."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from numbers import Real
from typing import TypeVar

import numpy as np

from babylon.core.errors import ArenaError, BabylonError, reason_of
from babylon.core.types import Ruling
from babylon.evaluation.arena.betting import CERTAIN, Differences, can_reach, log_wealth, sequence
from babylon.evaluation.arena.confidence import Interval, paired_sequence
from babylon.evaluation.tasks.evaluator import Endpoint, Evaluator, PlayScore

BATCH = 64  # worlds between two looks
AT_ONCE = 32  # plays
MAX_EXTRA_MALFORMED = 0.02  # share of the plays
Heard = Callable[[int, int], None]  # (worlds played, worlds at most)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMatch:
    """A finished match, with the scores ``[n]`` of both."""

    champion: tuple[PlayScore, ...]
    challenger: tuple[PlayScore, ...]
    difference: Interval
    ruling: Ruling
    reason: str

    @property
    def sides(self) -> tuple[tuple[PlayScore, ...], tuple[PlayScore, ...]]:
        return self.champion, self.challenger


async def play_task(
    evaluator: Evaluator[object],
    champion: Endpoint,
    challenger: Endpoint,
    worlds: Sequence[object],
    progress: Heard | None = None,
) -> TaskMatch:
    """Let both play the worlds, batch by batch, until there is a ruling.

    Raises:
        ArenaError: There is no world, a play fails, returns no score or one outside the evaluator's
            bounds, or it reports a harm that is no guardrail of the evaluator or no finite number.
    """
    if len(worlds) == 0:  # also of an array
        raise ArenaError("the evaluator made no worlds: it needs at least one to compare policies")
    before: list[PlayScore] = []
    after: list[PlayScore] = []
    for start in range(0, len(worlds), BATCH):
        batch = [*enumerate(worlds)][start : start + BATCH]
        for policy, scores in ((champion, before), (challenger, after)):
            scores += await _at_once([partial(_played, evaluator, w, policy, n) for n, w in batch])
        differences = _differences(evaluator, before, after)
        if progress is not None:
            progress(len(before), len(worlds))
        if ended := _ruled(evaluator, before, after, differences, len(worlds)):
            break
    assert ended is not None  # the last look always rules
    shown, (ruling, reason) = sequence(differences, len(worlds)), ended
    sides = {"champion": tuple(before), "challenger": tuple(after)}
    return TaskMatch(**sides, difference=shown, ruling=ruling, reason=reason)


async def _played(
    evaluator: Evaluator[object], world: object, policy: Endpoint, number: int
) -> PlayScore:
    seed = int.from_bytes(blake2b(str(number).encode(), digest_size=6).digest())
    try:
        playing: object = evaluator.play(world, policy, seed)
        if not inspect.isawaitable(playing):
            raise ArenaError("the evaluator's play is no coroutine: write async def play")
        score: PlayScore = await playing
    except SystemExit as error:  # it would end the worker without a word
        raise ArenaError(
            f"world {number}: the evaluator's play called sys.exit: raise an error, or return a low"
            " score"
        ) from error
    except asyncio.CancelledError as error:  # it would end the run as if a person had stopped it
        own = asyncio.current_task()
        if own is None or own.cancelling():
            raise
        raise ArenaError(
            f"world {number}: the evaluator's play awaited a task that was cancelled: catch"
            " asyncio.CancelledError there"
        ) from error
    except (BabylonError, ConnectionError):  # after a broken connection the stage is repeated
        raise
    except Exception as error:  # the user's code may raise anything
        raise ArenaError(
            f"world {number}: the evaluator's play raised {reason_of(error)}: return a low score"
            " for a bad reply, or repair the task"
        ) from error
    _check(evaluator, score, number)
    return score


def _check(evaluator: Evaluator[object], score: PlayScore, number: int) -> None:
    _check_types(score, number)
    # A misspelt name would count as no harm in both policies, and guard nothing.
    if unknown := sorted(score.guardrails.keys() - evaluator.guardrails.keys()):
        raise ArenaError(
            f"world {number}: the play reports {', '.join(unknown)}, but the evaluator's guardrails"
            f" are {', '.join(sorted(evaluator.guardrails)) or 'none'}: use the same names"
        )
    # One of the champion's would reject any challenger, whatever it does.
    if odd := sorted(name for name, harm in score.guardrails.items() if not _is_number(harm)):
        raise ArenaError(
            f"world {number}: the harm {odd[0]} is {score.guardrails[odd[0]]}: report a number, 0"
            " without harm"
        )
    if not (_is_number(score.value) and evaluator.lowest <= score.value <= evaluator.highest):
        raise ArenaError(
            f"world {number}: the evaluator's score {score.value} is not between"
            f" {evaluator.lowest} and {evaluator.highest}"
        )


def _check_types(score: PlayScore, number: int) -> None:
    if not isinstance(score, PlayScore):
        raise ArenaError(
            f"world {number}: the evaluator's play returned a {type(score).__name__}: return"
            " PlayScore(value=...)"
        )
    if not isinstance(score.guardrails, Mapping) or not isinstance(
        score.malformed, bool | np.bool_
    ):
        raise ArenaError(
            f"world {number}: the play's guardrails are a {type(score.guardrails).__name__} and its"
            f" malformed a {type(score.malformed).__name__}: give a mapping of numbers and a bool"
        )
    if not isinstance(score.value, Real):
        raise ArenaError(
            f"world {number}: the evaluator's score is a {type(score.value).__name__}: give a float"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


async def _at_once(plays: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Return the plays' results. If one fails, no other goes on: a play may cost money."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(play: Callable[[], Awaitable[T]]) -> T:
        async with limit:
            return await play()

    tasks = [asyncio.ensure_future(one(play)) for play in plays]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _differences(
    evaluator: Evaluator[object], before: Sequence[PlayScore], after: Sequence[PlayScore]
) -> Differences:
    values = np.array(
        [float(new.value) - float(old.value) for old, new in zip(before, after, strict=True)]
    )
    room = np.full(len(values), evaluator.highest - evaluator.lowest)
    return Differences(values, room, room)


def _ruled(
    evaluator: Evaluator[object],
    before: Sequence[PlayScore],
    after: Sequence[PlayScore],
    differences: Differences,
    budget: int,
) -> tuple[Ruling, str] | None:
    """Return (ruling, reason) on the play so far; None while undecided."""
    shown = f"{evaluator.unit}: difference {told(sequence(differences, budget))}"
    if reason := _harm(evaluator.guardrails, before, after, budget):
        return "reject", reason
    gain = log_wealth(differences, budget)[-1] >= CERTAIN
    doubt = _harm(evaluator.guardrails, before, after)
    if gain and doubt is None:
        return "promote", f"{shown} is a gain"
    if log_wealth(differences.reversed, budget)[-1] >= CERTAIN:
        return "reject", f"{shown} is a loss"
    if len(before) < budget and (gain or can_reach(differences, budget)):
        return None
    if gain and doubt is not None:  # no gain in the score makes up for a harm
        return "reject", doubt
    return "insufficient", f"insufficient evidence: {shown} after {len(before)} of {budget} worlds"


def _harm(
    limits: Mapping[str, float],
    before: Sequence[PlayScore],
    after: Sequence[PlayScore],
    budget: int | None = None,
) -> str | None:
    """Return the harm whose mean rose beyond its limit.

    With a ``budget`` of worlds, it surely did: its 95 % sequence, which holds at all looks until
    then, lies beyond the limit. The mean of few plays alone would condemn a policy that does no
    harm, and an interval for one look would do so at one of many.
    """
    harms = {"malformed plays": MAX_EXTRA_MALFORMED, **limits}
    for name, limit in harms.items():
        old, new = (_harms(scores, name) for scores in (before, after))
        rise = paired_sequence(old, new, budget or len(old))
        if not (rise.low if budget else rise.mean) <= limit:  # also if it is no number
            return (
                f"{name} rose from {np.mean(old):.3g} to {np.mean(new):.3g};"
                f" the limit is {limit:g} more"
            )
    return None


def _harms(scores: Sequence[PlayScore], harm: str) -> list[float]:
    if harm == "malformed plays":
        return [float(score.malformed) for score in scores]
    return [score.guardrails.get(harm, 0.0) for score in scores]


def told(interval: Interval) -> str:
    """Return an interval with three digits; scores may be small."""
    return f"{interval.mean:+.3g} [{interval.low:+.3g}, {interval.high:+.3g}]"

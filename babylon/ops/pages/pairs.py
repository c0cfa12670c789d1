"""Pairs of plays for a person to judge, side by side, with what really happened.

Ground truth is shown, as to any other judge. Whoever may see it is the caller's business.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec

from babylon.core.errors import WindowNotReadyError
from babylon.core.windows import GAME_MINUTES, parse_window_id
from babylon.ops.pages.trajectory import StepShown, read_trajectory
from babylon.scoring.judge.people import next_pair
from babylon.scoring.judge.prompt import one_line
from babylon.scoring.judge.reported_validity import judged_groups
from babylon.scoring.judge.validity import JudgedGroup
from babylon.store import Store
from babylon.store.judge_validity import judged_windows, judges_of
from babylon.store.late import without_taken_down
from babylon.store.market_outcomes import window_outcomes
from babylon.store.people import PairAnswer, read_answers, store_answer
from babylon.store.windows import get_window

_MOST_CHARS = 400  # of an answer or a result in a line
_WINDOWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayShown:
    """One trajectory of a pair: a line for each step, or for equal steps in a row."""

    trajectory_id: str
    agent_id: str
    pnl_usd: float | None
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShown:
    """Two plays of one group, and the market outcomes of their window."""

    window_id: str
    plays: tuple[PlayShown, PlayShown]
    truth: tuple[str, ...]
    answered: int


async def read_pair(store: Store, person: str, window_id: str | None = None) -> PairShown | None:
    """Return the next pair for a person, of a window or of the newest one with a pair left.

    Play that was taken down is shown to nobody. Return ``None`` if every pair is answered.

    Raises:
        WindowNotReadyError: no judge has judged the window.
    """
    windows = [window_id] if window_id else await judged_windows(store, _WINDOWS)
    for name in windows:
        groups = await _groups(store, name)
        if not groups:
            if window_id:
                raise WindowNotReadyError(f"no judge has judged window {name}: train it first")
            continue
        answers = await read_answers(store, [name], person)
        asked = {frozenset((one.better, one.worse)) for one in answers}
        pair = next_pair(await _still_shown(store, groups), asked, f"{person}:{name}")
        if pair is None:
            continue
        plays = [await _play(store, one) for one in pair]
        row = await get_window(store, name)
        window = parse_window_id(name, row.minutes if row else GAME_MINUTES)
        async with store.game.acquire() as connection:
            outcomes = await window_outcomes(connection, window)
        truth = tuple(_outcome_line(one.outcome_json) for one in outcomes)
        return PairShown(
            window_id=name, plays=(plays[0], plays[1]), truth=truth, answered=len(asked)
        )
    return None


async def answer_pair(
    store: Store, person: str, window_id: str, first: str, second: str, better: str, because: str
) -> None:
    """Store a person's answer to a pair.

    Raises:
        WindowNotReadyError: the two are not of one judged group of the window, or the better one
            is neither of them.
    """
    groups = await _groups(store, window_id)
    known = any({first, second} <= set(group.trajectory_ids) for group in groups)
    if not known or first == second or better not in (first, second):
        raise WindowNotReadyError(
            f"window {window_id} has no judged group with the two trajectories of this answer"
        )
    row = await store.pool.fetchrow(
        "SELECT scenario_id FROM babylon.judgments WHERE window_id = $1 AND $2 = ANY("
        "trajectory_ids) AND NOT starts_with(judge, 'person:') LIMIT 1",
        window_id,
        better,
    )
    answer = PairAnswer(
        window_id=window_id,
        scenario_id=row["scenario_id"] if row else "",
        person=person,
        better=better,
        worse=second if better == first else first,
        first=first,
    )
    await store_answer(store, answer, one_line(because)[:_MOST_CHARS])


async def _groups(store: Store, window_id: str) -> list[JudgedGroup]:
    """Return the groups of the judge that judged the window first, with their trajectories."""
    rows = await judges_of(store, window_id)
    found = [[group for group in judged_groups(row) if group.trajectory_ids] for row in rows]
    return next(filter(None, found), [])


async def _still_shown(store: Store, groups: Iterable[JudgedGroup]) -> list[JudgedGroup]:
    """Return the groups without play that was taken down or removed since."""
    found = []
    for group in groups:
        left = set(await without_taken_down(store, group.trajectory_ids))
        kept = [at for at, name in enumerate(group.trajectory_ids) if name in left]
        shown = replace(
            group,
            opinions=tuple(group.opinions[at] for at in kept),
            errors=tuple(group.errors[at] for at in kept),
            outcomes=tuple(group.outcomes[at] for at in kept),
            trajectory_ids=tuple(group.trajectory_ids[at] for at in kept),
        )
        found.append(shown)
    return found


async def _play(store: Store, trajectory_id: str) -> PlayShown:
    shown = await read_trajectory(store, trajectory_id)
    if shown is None:  # retention removed it, or it came by another way
        return PlayShown(trajectory_id=trajectory_id, agent_id="", pnl_usd=None, lines=())
    lines = await asyncio.to_thread(_lines, shown.steps)
    if shown.more:
        lines += (f"{shown.more} more steps are not shown",)
    return PlayShown(
        trajectory_id=trajectory_id, agent_id=shown.agent_id, pnl_usd=shown.pnl_usd, lines=lines
    )


def _lines(steps: Iterable[StepShown]) -> tuple[str, ...]:
    """Return a line for each step, and one line for equal steps in a row."""
    lines = []
    for text, run in groupby(steps, key=_line):
        numbers = [step.number for step in run]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        lines.append(f"[{span}] {text}")
    return tuple(lines)


def _line(step: StepShown) -> str:
    said = " / ".join(_short(call.answer) for call in step.calls)
    done = " ".join(f"{name}={_short(value)}" for name, value in step.action.items())
    return f"{said} | {done}"


def _outcome_line(row: str) -> str:
    values = msgspec.json.decode(row)
    return ", ".join(f"{name} {_short(str(v))}" for name, v in values.items() if v is not None)


def _short(text: str) -> str:
    text = one_line(text)  # a terminal obeys control characters
    return text if len(text) <= _MOST_CHARS else text[:_MOST_CHARS] + "…"

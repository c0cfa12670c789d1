"""One trajectory step by step, without ground truth: prompt, answer, tool calls, action."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from babylon.store import Store
from babylon.store.connection import require_game_tables

MOST_CHARS = 20_000  # of one text on a page
MOST_STEPS = 1_000  # of one page
_PUBLIC = {"actionType", "actionName", "parameters", "success", "result", "error", "reasoning"}
"""Fields of an action that the agent saw. Others, such as ``correctness``, tell the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShown:
    """One request of a step, as the agent sent it, and the answer."""

    purpose: str
    model: str
    prompts: tuple[tuple[str, str], ...]  # role, text
    answer: str
    tools: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShown:
    """One step. The game's reward of a step is left out: it may tell the outcome."""

    number: int
    calls: tuple[CallShown, ...]
    action: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryShown:
    """A trajectory of the game's table. ``pnl_usd`` is the game's own figure.

    ``more``: steps after the first ``MOST_STEPS``, which are not shown.
    """

    trajectory_id: str
    agent_id: str
    pnl_usd: float | None
    steps: tuple[StepShown, ...]
    more: int


async def read_trajectory(store: Store, trajectory_id: str) -> TrajectoryShown | None:
    """Return a trajectory as it was recorded, ``None`` if there is none of that id."""
    require_game_tables(store)
    row = await store.game.fetchrow(
        'SELECT "trajectoryId", "agentId", "finalPnL"::float8, "stepsJson" FROM trajectories'
        ' WHERE "trajectoryId" = $1',
        trajectory_id,
    )
    if row is None:
        return None
    # A large one takes seconds, and this process also answers the admin API.
    steps, more = await asyncio.to_thread(_steps, row["stepsJson"])
    return TrajectoryShown(
        trajectory_id=row["trajectoryId"],
        agent_id=row["agentId"],
        pnl_usd=row["finalPnL"],
        steps=steps,
        more=more,
    )


def _steps(steps_json: object) -> tuple[tuple[StepShown, ...], int]:
    """Return the first steps, and the number of the others."""
    found = _list(steps_json)
    shown = tuple(_step(at, step) for at, step in enumerate(found[:MOST_STEPS]))
    return shown, len(found) - len(shown)


def _step(at: int, step: object) -> StepShown:
    """Show a step leniently: rejected rows, which may hold anything, are looked at most."""
    fields = step if isinstance(step, dict) else {}
    action = fields.get("action")
    done = action if isinstance(action, dict) else {}
    calls = [call for call in _list(fields.get("llmCalls")) if isinstance(call, dict)]
    return StepShown(
        number=at + 1,
        calls=tuple(map(_call, calls)),
        action={name: shown_text(value) for name, value in done.items() if name in _PUBLIC},
    )


def _call(call: dict[str, Any]) -> CallShown:
    messages = [
        (str(one.get("role")), shown_text(one.get("content")))
        for one in _list(call.get("messages"))
        if isinstance(one, dict)
    ]
    prompts = messages or [
        (role, shown_text(call[name]))
        for role, name in (("system", "systemPrompt"), ("user", "userPrompt"))
        if call.get(name)
    ]
    return CallShown(
        purpose=str(call.get("purpose", "")),
        model=str(call.get("modelVersion") or call.get("model", "")),
        prompts=tuple(prompts),
        answer=shown_text(call.get("response")),
        tools=shown_text(call["toolCalls"]) if call.get("toolCalls") else "",
    )


def _list(value: object) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return value if isinstance(value, list) else []


def shown_text(value: object) -> str:
    """Return a value of play as text of bounded length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + "…"

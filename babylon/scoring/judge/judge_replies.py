"""The judge's values of several replies to one prompt.

The judge sees each reply as the last step of the agent's play up to that moment, without what came
of it, and compares the replies of a prompt as a group of their own. Its opinions are the values: no
outcome of a reply that was never carried out is known, so nothing shows how far to trust them.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from babylon.core.home import Home
from babylon.core.settings import JudgeSettings
from babylon.core.trajectories import Call
from babylon.core.types import Scored
from babylon.scoring.judge.budget import Budget, BudgetLimits
from babylon.scoring.judge.condense import REPLY, step_number
from babylon.scoring.judge.evidence import read_evidence
from babylon.scoring.judge.judge_requirements import require_judge
from babylon.scoring.judge.judge_scorers import open_judge
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import (
    GroundTruth,
    JudgeConfig,
    JudgedTrajectory,
    load_rubric,
)
from babylon.scoring.judge.pace import Pace
from babylon.store.connection import Store
from babylon.store.judgments import StoredJudgments


class Point(Protocol):
    """A recorded decision: a call of a trajectory."""

    @property
    def trajectory_id(self) -> str: ...

    @property
    def call(self) -> Call: ...


async def judge_replies(
    store: Store,
    judge: JudgeSettings,
    scored: Scored,
    points: Sequence[Point],
    replies: Sequence[Sequence[str]],
) -> list[list[float] | None]:
    """Return the judge's score in [0, 1] of each reply; None where it judged not all of a prompt,
    and where all of a prompt's replies are equal.

    Requests count against the judge's budget, and judgments are stored with the window's.

    Raises:
        ConfigError: a setting of the judge is missing.
        ScoringError: the judge failed.
        BudgetSpentError: the budget is spent; a later run tries again.
    """
    require_judge("PREFERENCE_VALUES=judge", judge)
    # Equal replies are one play. A prompt without two different ones has nothing to compare.
    different = [[*dict.fromkeys(texts)] for texts in replies]
    asked = [texts if len(texts) > 1 else [] for texts in different]
    group, truth = await asyncio.to_thread(_plays, store.home, scored, points, asked)
    if not group:
        return [None] * len(points)
    config = JudgeConfig(
        rubric=load_rubric(judge.rubric),
        context_tokens=judge.context_tokens,
        reasoning_tokens=judge.reasoning_tokens,
        passes=judge.passes,
        repeats=False,  # a pass costs as much as a window's scores
    )
    async with open_judge(judge, config, _log(store.home)) as (client, fitting):
        judgments = await judge_window(
            client,
            group,
            truth,
            fitting,
            ledger=StoredJudgments(store, scored.claim.window_id),
            budget=Budget(
                window=BudgetLimits(tokens=judge.window_tokens, usd=judge.window_usd),
                day=BudgetLimits(tokens=judge.day_tokens, usd=judge.day_usd),
            ),
            retries=judge.retries,
            pace=Pace(judge.requests_per_minute, judge.tokens_per_minute),
        )
    scores = {one.trajectory_id: one.score for one in judgments.scores}
    values: list[list[float] | None] = []
    for point, texts, own in zip(points, replies, asked, strict=True):
        judged = {text: scores.get(_name(point, number)) for number, text in enumerate(own)}
        found = [value for text in texts if (value := judged.get(text)) is not None]
        values.append(found if len(found) == len(texts) else None)
    return values


def _plays(
    home: Home, scored: Scored, points: Sequence[Point], replies: Sequence[Sequence[str]]
) -> tuple[list[JudgedTrajectory], GroundTruth]:
    """Return each reply as a play, and the window's outcomes. Blocking."""
    judged, truth, _ = read_evidence(home, scored.artifact)
    known = {one.trajectory.trajectory_id: one for one in judged}
    plays = [
        as_play(known[point.trajectory_id], point, number, text)
        for point, texts in zip(points, replies, strict=True)
        if point.trajectory_id in known
        for number, text in enumerate(texts)
    ]
    return plays, truth


def as_play(judged: JudgedTrajectory, point: Point, number: int, reply: str) -> JudgedTrajectory:
    """Return the play up to a decision, with this reply as its last step and nothing after it."""
    number_of = [step_number(one, index) for index, one in enumerate(judged.steps)]
    place = number_of.index(point.call.step)
    decision = judged.steps[place]
    before = [one for one in judged.trajectory.calls if one.step < point.call.step]
    last = {name: decision[name] for name in _SEEN if name in decision}
    asked = [one for one in decision.get("llmCalls", ()) if one.get("purpose") == "action"]
    last["llmCalls"] = [{**one, "response": None, "reasoning": None} for one in asked[-1:]]
    words = {"actionType": REPLY, "parameters": {"reply": reply}, "success": True}
    return JudgedTrajectory(
        trajectory=replace(
            judged.trajectory,
            trajectory_id=_name(point, number),
            scenario_id=_name(point),
            pnl_usd=0.0,
            drawdown_usd=0.0,
            wins=0,
            trades=0,
            actions=1,
            steps=place + 1,
            calls=(*before, replace(point.call, response=reply, tool_calls=(), reasoning=None)),
            payoffs=(),
        ),
        steps=(*judged.steps[:place], {**last, "action": words}),
        knowledge=judged.knowledge,
    )


_SEEN = ("stepNumber", "timestamp", "environmentState", "providerAccesses")


def _name(point: Point, number: int | None = None) -> str:
    name = f"{point.trajectory_id}#{point.call.step}"
    return name if number is None else f"{name}.{number}"


def _log(home: Home) -> Path:
    return home.logs / "judge.log"

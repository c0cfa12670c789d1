"""``art-ruler``: OpenPipe ART's own RULER, for comparison with ``ruler``.

ART sends each group (scenario) to the judge in one prompt and reads the scores from the reply.
Scores are matched by position; nothing is shuffled or repeated. If all trajectories of a group have
the same text, ART gives them one score. ART takes only messages, so each trajectory becomes one
chat: the agent's prompts and replies, call by call, and a last message with the result. It holds no
ground truth.

A reply that ART cannot use is asked for once more. Then the group is split, down to single
trajectories, so that one text that the judge refuses costs only its own trajectory.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby

from babylon.core.errors import ScoringError, reason_of
from babylon.core.llm_calls import Message
from babylon.core.trajectories import Trajectory
from babylon.core.types import Rejection
from babylon.quality.decode import Reason
from babylon.scoring.judge.judge_requirements import require_art_judge
from babylon.scoring.judge.judgment import load_rubric
from babylon.scoring.scorer import Score, ScoreOrRejection, ScoringContext

Chat = list[Message]
Rewards = Callable[[Sequence[Chat]], Awaitable[Sequence[float]]]

_ATTEMPTS = 2
_ABOUT_THE_TEXT = (None, 400, 413, 422)  # HTTP status; None: the reply cannot be used


async def art_ruler(
    trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[ScoreOrRejection]:
    """Return one score for each trajectory, from the judge and the rubric of the settings.

    Raises:
        ConfigError: no ``JUDGE_MODEL`` is named; a rubric or key is missing.
        Exception: as ``scores_by_art``.
    """
    judge = context.settings.judge
    require_art_judge(judge)
    key = judge.api_key
    return await scores_by_art(
        trajectories,
        model=judge.model or "",
        base_url=judge.base_url,
        api_key=key.get_secret_value() if key else "none",
        rubric=load_rubric(judge.rubric).text,
    )


async def scores_by_art(
    trajectories: Sequence[Trajectory], *, model: str, base_url: str, api_key: str, rubric: str
) -> list[ScoreOrRejection]:
    """Return the scores of ART's ``ruler_score_group``, in order, and rejections in their place.

    Args:
        model: the judge's name at ``base_url``, an OpenAI-compatible server (ends in ``/v1``).
        rubric: the grading standards, in words.

    Raises:
        ScoringError: more than half of the trajectories have no score.
        Exception: the server cannot be asked (a wrong key, a rate limit that litellm gave up on).
    """
    of_art = await asyncio.to_thread(_load)

    async def rewards(chats: Sequence[Chat]) -> Sequence[float]:
        return await of_art(chats, model=model, base_url=base_url, api_key=api_key, rubric=rubric)

    scenario = [trajectory.scenario_id for trajectory in trajectories]
    order = sorted(range(len(trajectories)), key=scenario.__getitem__)
    found: dict[int, ScoreOrRejection] = {}
    for _, members in groupby(order, key=scenario.__getitem__):
        await _score_part(trajectories, list(members), rewards, found)
    return [found[index] for index in range(len(trajectories))]


async def _score_part(
    trajectories: Sequence[Trajectory],
    part: Sequence[int],
    rewards: Rewards,
    found: dict[int, ScoreOrRejection],
) -> None:
    problem = ""
    for _ in range(_ATTEMPTS):
        try:
            values = await rewards([as_chat(trajectories[index]) for index in part])
        except Exception as error:  # of ART, litellm or pydantic, which share no base
            if getattr(error, "status_code", None) not in _ABOUT_THE_TEXT:
                raise
            problem = reason_of(error)
            continue
        if len(values) == len(part) and all(math.isfinite(value) for value in values):
            found.update(zip(part, map(Score, values), strict=True))
            return
        problem = "its reply does not hold one finite score for each trajectory"
    if len(part) > 1:
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            await _score_part(trajectories, half, rewards, found)
        return
    found[part[0]] = Rejection(
        trajectory_id=trajectories[part[0]].trajectory_id,
        reason=Reason.NO_JUDGMENT,
        detail=f"ART's RULER gives no score: {problem}",
    )
    if 2 * sum(isinstance(one, Rejection) for one in found.values()) > len(trajectories):
        raise ScoringError(
            f"art-ruler: the judge scored no more than half of {len(trajectories)} trajectories"
            f" ({problem}): use another JUDGE_MODEL, or the scorer ruler"
        )


def as_chat(trajectory: Trajectory) -> Chat:
    """Return the trajectory as one chat. Messages that a call repeats appear once."""
    own = trajectory
    result = (
        f"Result: {own.steps} steps, {own.actions} actions, {own.wins} of {own.trades} decided"
        f" trades won, P&L in this window ${own.pnl_usd:+.2f}"
    )
    return [*_conversation(trajectory), {"role": "user", "content": result}]


def _conversation(trajectory: Trajectory) -> Iterator[Message]:
    seen: Chat = []
    for call in trajectory.calls:
        sent = list(call.messages)
        if sent[: len(seen)] == seen:
            fresh = sent[len(seen) :]
        else:
            fresh = [m for m in sent if m.get("role") != "system" or m not in seen]
        fresh = [*fresh, call.answer]
        seen += fresh
        yield from fresh


def _load() -> Callable[..., Awaitable[list[float]]]:
    # Importing ART takes seconds, so it happens only if this scorer is chosen.
    from babylon.training.backends.art_client import ruler_rewards

    return ruler_rewards

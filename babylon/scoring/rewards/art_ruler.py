"""``art-ruler``: OpenPipe ART's own RULER, for comparison with ``ruler``.

ART sends each group (scenario) to the judge in one prompt and reads the scores from the reply.
Scores are matched by position; nothing is shuffled, checked or repeated. If all trajectories of a
group have the same text, ART gives them one score. ART takes only messages, so each trajectory
becomes one chat: the agent's prompts and replies, call by call, and a last message with the result.
It holds no ground truth.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby

from babylon.core.llm_calls import Message
from babylon.core.trajectories import Trajectory
from babylon.scoring.judge.judge_requirements import require_art_judge
from babylon.scoring.judge.judgment import load_rubric
from babylon.scoring.scorer import Score, ScoringContext

Chat = list[Message]


async def art_ruler(trajectories: Sequence[Trajectory], context: ScoringContext) -> list[Score]:
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
) -> list[Score]:
    """Return one score for each trajectory, in order, as ART's ``ruler_score_group`` gives it.

    Args:
        model: the judge's name at ``base_url``, an OpenAI-compatible server (ends in ``/v1``).
        rubric: the grading standards, in words.

    Raises:
        Exception: ART or litellm failed on a group (a reply that does not parse, too few scores, a
            server that refuses). Nothing is scored then.
    """
    rewards_of = await asyncio.to_thread(_load)
    scenario = [trajectory.scenario_id for trajectory in trajectories]
    order = sorted(range(len(trajectories)), key=scenario.__getitem__)
    found: dict[int, Score] = {}
    for _, members in groupby(order, key=scenario.__getitem__):
        group = list(members)
        rewards = await rewards_of(
            [as_chat(trajectories[index]) for index in group],
            model=model,
            base_url=base_url,
            api_key=api_key,
            rubric=rubric,
        )
        found |= {index: Score(reward) for index, reward in zip(group, rewards, strict=True)}
    return [found[index] for index in range(len(trajectories))]


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

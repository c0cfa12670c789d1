"""``art-ruler``: OpenPipe ART's own RULER, for comparison with ``ruler``.

Each group (scenario) goes to the judge in one prompt, as ART makes it, and gets the scores that ART
reads from the answer; scores are matched by position, nothing is shuffled, checked or repeated. A
group of trajectories that are all the same text gets one score. ART knows messages alone, so each
trajectory becomes one chat: what the agent saw and said, call by call, and last a message that
tells what came of it. Ground truth has no place there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby

from babylon.core.trajectories import Trajectory
from babylon.scoring.judge.judge_requirements import require_art_judge
from babylon.scoring.judge.rubrics import load_rubric
from babylon.scoring.scorer import Score, ScoringContext

Chat = list[dict[str, str]]


async def art_ruler(trajectories: Sequence[Trajectory], context: ScoringContext) -> list[Score]:
    """The scorer: asks the judge of the settings by their rubric; one score a trajectory.

    Raises:
        ConfigError: no ``JUDGE_MODEL`` is named; a rubric or key is missing.
        Exception: as ``scores_by_art``.
    """
    settings = context.settings
    require_art_judge(settings)
    key = settings.judge.api_key
    return await scores_by_art(
        trajectories,
        model=settings.judge.model or "",
        base_url=settings.judge.base_url,
        api_key=key.get_secret_value() if key else "none",
        rubric=load_rubric(settings.judge.rubric).text,
    )


async def scores_by_art(
    trajectories: Sequence[Trajectory], *, model: str, base_url: str, api_key: str, rubric: str
) -> list[Score]:
    """One score a trajectory, in order, as ART's ``ruler_score_group`` gives it.

    Args:
        model: the judge's name at ``base_url``, an OpenAI-compatible server (ends in ``/v1``).
        rubric: the grading standards, in words.

    Raises:
        Exception: whatever ART or litellm raises on a group (an answer that does not parse, too
            few scores, a server that refuses); nothing is scored then.
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
    """The trajectory as one conversation; what a call repeats of earlier ones is told once."""
    return [*_told(trajectory), {"role": "user", "content": _result(trajectory)}]


def _told(trajectory: Trajectory) -> Iterator[dict[str, str]]:
    told: Chat = []
    for call in trajectory.calls:
        sent = [{"role": message.role, "content": message.content} for message in call.messages]
        fresh = sent[len(told) :] if sent[: len(told)] == told else _unseen_system(sent, told)
        fresh = [*fresh, {"role": "assistant", "content": call.response}]
        told += fresh
        yield from fresh


def _unseen_system(sent: Chat, told: Chat) -> Chat:
    return [message for message in sent if message["role"] != "system" or message not in told]


def _result(trajectory: Trajectory) -> str:
    own = trajectory
    return (
        f"Result: {own.steps} steps, {own.actions} actions, {own.wins} of {own.trades} decided"
        f" trades won, P&L in this window ${own.pnl_usd:+.2f}"
    )


def _load() -> Callable[..., Awaitable[list[float]]]:
    """Importing ART takes seconds, and only those who chose it pay for it."""
    from babylon.art.client import ruler_rewards

    return ruler_rewards

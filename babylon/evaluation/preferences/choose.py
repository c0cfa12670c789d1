"""The prompts of a window that are most worth answering again.

A pair of replies teaches where the choice matters and the policy is undecided. The agents of a
scenario met the same moment at the same step, so their answers show both at no cost: rewards that
differ show that the choice mattered, differing answers that the policy was undecided.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from babylon.core.trajectories import Call, TrainingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionPoint:
    """A recorded decision whose exact prompt is known.

    ``disagreement``: spread of its step's rewards, or else the share of other answers; then the
    surprise of its own reply, nats a token. Larger is more informative.
    """

    trajectory_id: str
    agent_id: str
    scenario_id: str
    call: Call
    disagreement: tuple[float, float, float]


def informative(rows: Sequence[TrainingRow], most: int) -> list[DecisionPoint]:
    """Return at most ``most`` decisions, the most informative first.

    Each moment of a scenario comes once before any comes twice: the agents' prompts there differ in
    little more than their accounts. Decisions whose prompt's tokens are unknown cannot be answered
    again exactly and are left out.
    """
    moments: dict[tuple[str, int], list[tuple[TrainingRow, Call]]] = defaultdict(list)
    for row in rows:
        for call in row.calls:
            if call.prompt_token_ids and not call.tools and not call.untrainable:
                moments[row.scenario_id, call.step].append((row, call))
    # Rewards come before answers: where nothing depends on the choice, no pair has two values.
    ranked: list[tuple[int, DecisionPoint]] = []
    for (scenario_id, step), met in moments.items():
        rewards = [row.rewards[step] for row, _ in met if step in row.rewards]
        spread = pstdev(rewards) if len(rewards) > 1 else 0.0
        commonest = Counter(call.response for _, call in met).most_common(1)[0][1]
        undecided = 1 - commonest / len(met)
        points = [
            DecisionPoint(
                trajectory_id=row.trajectory_id,
                agent_id=row.agent_id,
                scenario_id=scenario_id,
                call=call,
                disagreement=(spread, undecided, _surprise(call)),
            )
            for row, call in met
        ]
        points.sort(key=lambda point: (-point.disagreement[2], point.trajectory_id))
        # What is sampled is stored by step: of an agent's calls there, one is answered again.
        of_agents: dict[str, DecisionPoint] = {}
        for point in points:
            of_agents.setdefault(point.trajectory_id, point)
        ranked += enumerate(of_agents.values())
    ranked.sort(
        key=lambda one: (
            one[0],
            *(-part for part in one[1].disagreement),
            one[1].trajectory_id,
            one[1].call.step,
        )
    )
    return [point for _, point in ranked[:most]]


def _surprise(call: Call) -> float:
    return -fmean(call.logprobs) if call.logprobs else 0.0

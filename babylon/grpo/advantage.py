"""Group-relative advantages with a leave-one-out baseline (RLOO, arXiv 2402.14740, eq. 8).

``A_i = s_i - mean of the others = n / (n - 1) * (s_i - mean)``. Unlike GRPO (arXiv 2402.03300)
there is no division by the group's standard deviation, which would blow up near-ties.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from babylon.grpo.batch import ScoredTrajectory, WeightedCall

MIN_GROUP_STD = 1e-3


def advantages(trajectories: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """Trajectory id → advantage. Groups of one and groups without differing scores are left out."""
    groups: dict[str, list[ScoredTrajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    result: dict[str, float] = {}
    for members in groups.values():
        scores = [member.score for member in members]
        if len(members) < 2 or pstdev(scores) < MIN_GROUP_STD:
            continue
        mean, factor = fmean(scores), len(members) / (len(members) - 1)
        result |= {m.trajectory_id: factor * (m.score - mean) for m in members}
    return result


def weigh_calls(
    trajectories: Sequence[ScoredTrajectory], advantage: dict[str, float]
) -> list[WeightedCall]:
    """Every call of every trajectory that has an advantage, with that advantage and its weight."""
    kept = [t for t in trajectories if t.trajectory_id in advantage]
    mean_length = fmean(len(call.completion) for t in kept for call in t.calls) if kept else 1.0
    return [
        WeightedCall(
            tokens=call,
            trajectory=index,
            advantage=advantage[trajectory.trajectory_id],
            weight=1.0 / (len(trajectory.calls) * mean_length),
        )
        for index, trajectory in enumerate(kept)
        for call in trajectory.calls
    ]

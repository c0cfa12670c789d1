"""Advantages of trajectories within their group, and weights of calls within a train step.

The default is the leave-one-out baseline (RLOO, arXiv 2402.14740, eq. 8): ``A_i = s_i - mean of
the others = n / (n - 1) * (s_i - mean)``. Unlike GRPO (arXiv 2402.03300, section 4.1.2), it does
not divide by the group's standard deviation, because that amplifies near-ties. Division by the
group's deviation is an option, and so is division by the window's (REINFORCE++, arXiv 2501.03262).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from babylon.training.grpo.training_input import ScoredTrajectory

MIN_GROUP_STD = 1e-3
Advantage = Literal["leave_one_out", "group_std", "batch_std"]
CallWeight = Literal["trajectory", "token", "trajectory_tokens", "call", "constant"]


def advantages(
    trajectories: Sequence[ScoredTrajectory], kind: Advantage = "leave_one_out"
) -> dict[str, float]:
    """Trajectory id → advantage. Groups of one and groups with equal scores are left out."""
    groups: dict[str, list[ScoredTrajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    result: dict[str, float] = {}
    for members in groups.values():
        scores = [member.score for member in members]
        if len(members) < 2 or (spread := pstdev(scores)) < MIN_GROUP_STD:
            continue
        mean = fmean(scores)
        factor = 1 / spread if kind == "group_std" else len(members) / (len(members) - 1)
        result |= {m.trajectory_id: factor * (m.score - mean) for m in members}
    if kind == "batch_std" and result:
        spread = pstdev(result.values(), mu=0.0)  # the advantages of each group sum to zero
        result = {name: value / spread for name, value in result.items()}
    return result


def call_masses(
    lengths: Sequence[int], trajectory_of: Sequence[int], kind: CallWeight
) -> list[float]:
    """Each call's share of a train step's loss. The shares sum to one.

    ``trajectory``: all trajectories have equal shares, and within each, all calls.
    ``trajectory_tokens``: all trajectories have equal shares, and within each, all tokens.
    ``token``: all tokens of the step have equal shares. ``call`` and ``constant``: all calls have
    equal shares.

    Args:
        lengths: ``[C]``, completion tokens of each call.
        trajectory_of: ``[C]``, index of each call's trajectory.
    """
    calls_of = Counter(trajectory_of)
    tokens_of: Counter[int] = Counter()
    for length, trajectory in zip(lengths, trajectory_of, strict=True):
        tokens_of[trajectory] += length

    def mass(length: int, trajectory: int) -> float:
        if kind == "trajectory":
            return 1 / (len(calls_of) * calls_of[trajectory])
        if kind == "trajectory_tokens":
            return length / (len(calls_of) * tokens_of[trajectory])
        return length / tokens_of.total() if kind == "token" else 1 / len(lengths)

    return [mass(*call) for call in zip(lengths, trajectory_of, strict=True)]


def call_weights(
    lengths: Sequence[int],
    trajectory_of: Sequence[int],
    kind: CallWeight,
    *,
    mean_length: float,
    constant: int,
) -> list[float]:
    """The factor of each call's summed token losses: its mass divided by a length.

    ``trajectory`` divides by ``mean_length``, the window's mean completion, so that long replies
    are neither rewarded nor punished: ``1 / (N * K * C)`` for N trajectories of K calls.
    ``constant`` divides by a fixed length. The other kinds divide by the call's own length.
    """
    fixed = {"trajectory": mean_length, "constant": float(constant)}.get(kind)
    masses = call_masses(lengths, trajectory_of, kind)
    return [mass / (fixed or length) for mass, length in zip(masses, lengths, strict=True)]

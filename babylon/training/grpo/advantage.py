"""Advantages of trajectories within their group, and what each of their calls counts.

The default is the leave-one-out baseline (RLOO, arXiv 2402.14740, eq. 8): ``A_i = s_i - mean of
the others = n / (n - 1) * (s_i - mean)``. Unlike GRPO (arXiv 2402.03300, section 4.1.2) there is
no division by the group's standard deviation, which would blow up near-ties; it is an option, as
is that of the whole window (REINFORCE++, arXiv 2501.03262).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from babylon.training.grpo.training_input import ScoredTrajectory, TrainingCall

MIN_GROUP_STD = 1e-3
Advantage = Literal["leave_one_out", "group_std", "batch_std"]
CallWeight = Literal["trajectory", "token", "trajectory_tokens", "call", "constant"]


def advantages(
    trajectories: Sequence[ScoredTrajectory], kind: Advantage = "leave_one_out"
) -> dict[str, float]:
    """Trajectory id → advantage. Groups of one and groups without differing scores are left out."""
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
        spread = pstdev(result.values(), mu=0.0)  # each group's sum is zero
        result = {name: value / spread for name, value in result.items()}
    return result


def call_masses(calls: Sequence[TrainingCall], kind: CallWeight) -> list[float]:
    """What share of a train step's loss each of its calls is; they add up to one.

    ``trajectory``: every trajectory the same, and within it every call. ``trajectory_tokens``:
    every trajectory the same, and within it every token. ``token``: every token of the step the
    same. ``call`` and ``constant``: every call the same.
    """
    owners = Counter(call.trajectory for call in calls)
    tokens: Counter[int] = Counter()
    for call in calls:
        tokens[call.trajectory] += len(call.tokens.completion)

    def mass(call: TrainingCall) -> float:
        length, owner = len(call.tokens.completion), call.trajectory
        if kind == "trajectory":
            return 1 / (len(owners) * owners[owner])
        if kind == "trajectory_tokens":
            return length / (len(owners) * tokens[owner])
        return length / tokens.total() if kind == "token" else 1 / len(calls)

    return [mass(call) for call in calls]


def call_weights(
    calls: Sequence[TrainingCall], kind: CallWeight, *, mean_length: float, constant: int
) -> list[float]:
    """The factor of each call's summed token losses: its mass, divided by a length.

    ``trajectory`` divides by ``mean_length``, the window's mean completion, so that long replies
    are neither rewarded nor punished: ``1 / (N * K * C)`` for N trajectories of K calls.
    ``constant`` divides by a length that no window changes. The others divide by the call's own.
    """
    fixed = {"trajectory": mean_length, "constant": float(constant)}.get(kind)
    return [
        mass / (fixed or len(call.tokens.completion))
        for call, mass in zip(calls, call_masses(calls, kind), strict=True)
    ]

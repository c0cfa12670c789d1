"""Credit: the advantage of each call, from its trajectory's score or from its own decision.

``trajectory``: every call has its trajectory's advantage (``babylon.training.grpo.advantage``).

``decision``: the calls of step t of trajectory i are compared with the same step of the others of
the group, who met the same world at the same tick. With rewards ``r``, score ``s``, discount
``gamma`` and the n trajectories that took step t,

    G_it = s_i - sum_k r_ik + sum_{k >= t} gamma^(k-t) r_ik          k counts the steps taken
    A_it = G_it - mean_{j != i} G_jt = n / (n - 1) * (G_it - mean_j G_jt)

The part of a score that no step earned counts for every step. With gamma = 1, this is REINFORCE
with returns-to-go (Williams 1992; Sutton et al. 1999) and the leave-one-out baseline of arXiv
2402.14740, eq. 8. The baseline does not depend on the agent's own replies, so it adds no bias; a
gamma below 1 trades bias for variance (Schulman et al., arXiv 1506.02438, section 3). Comparisons
in the same state are those of GiGPO (arXiv 2505.10978) and VinePPO (arXiv 2410.01679), but without
extra samples: a group shares its world. A step that nobody else took is compared with the mean of
all returns of the others. A group without any rewards gets its trajectories' credit.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean, pstdev

from babylon.training.grpo.advantage import MIN_GROUP_STD, Advantage, advantages
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.training_input import ScoredTrajectory


def call_advantages(
    trajectories: Sequence[ScoredTrajectory], config: TrainerConfig
) -> dict[str, list[float]]:
    """Trajectory id → the advantage of each of its K calls, ``[K]``.

    Left out are trajectories whose group teaches nothing: a group of one, or one with equal scores
    (``decision``: with equal returns at every step).
    """
    known = {t.group for t in trajectories if t.rewards and config.credit == "decision"}
    members = [t for t in trajectories if t.group in known]
    kind: Advantage = "leave_one_out" if config.advantage == "batch_std" else config.advantage
    whole = advantages([t for t in trajectories if t.group not in known], kind)
    by_step = _step_advantages(members, config.discount, kind)
    result = {
        t.trajectory_id: [whole[t.trajectory_id]] * len(t.calls)
        for t in trajectories
        if t.trajectory_id in whole
    }
    taught = {members[index].group for index, _ in by_step}
    for index, own in enumerate(members):
        if own.group in taught:
            values = [by_step.get((index, call.step), 0.0) for call in own.calls]
            result[own.trajectory_id] = values
    if config.advantage == "batch_std" and (every := [*whole.values(), *by_step.values()]):
        spread = pstdev(every, mu=0.0)  # of the window, whatever its groups are credited by
        return {name: [value / spread for value in values] for name, values in result.items()}
    return result


def _step_advantages(
    members: Sequence[ScoredTrajectory], discount: float, kind: Advantage
) -> dict[tuple[int, int], float]:
    """(index of the trajectory, step) → advantage. Steps with equal returns are left out."""
    compared: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    everything: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for index, own in enumerate(members):
        for step, value in returns(own, discount).items():
            compared[own.group, step][index] = value
            everything[own.group].append((index, value))
    result: dict[tuple[int, int], float] = {}
    for (group, step), values in compared.items():
        if len(values) == 1:
            result |= {
                (index, step): gap
                for index, value in values.items()
                if (gap := _alone(index, value, everything[group], kind)) is not None
            }
            continue
        if (spread := pstdev(values.values())) < MIN_GROUP_STD:
            continue
        mean = fmean(values.values())
        factor = 1 / spread if kind == "group_std" else len(values) / (len(values) - 1)
        result |= {(index, step): factor * (value - mean) for index, value in values.items()}
    return result


def _alone(
    index: int, value: float, everything: Sequence[tuple[int, float]], kind: Advantage
) -> float | None:
    """Return the advantage of a step that only trajectory ``index`` took; None if it is none."""
    others = [other for member, other in everything if member != index]
    if not others or abs(gap := value - fmean(others)) < MIN_GROUP_STD:
        return None
    return gap / pstdev([*others, value]) if kind == "group_std" else gap


def returns(own: ScoredTrajectory, discount: float) -> dict[int, float]:
    """Step with a call → its return: what it and later steps earned, and what no step earned."""
    called = {call.step for call in own.calls}
    shared = own.score - sum(own.rewards.values())
    result: dict[int, float] = {}
    ahead = 0.0
    for step in _descending(chain(called, own.rewards)):
        ahead = own.rewards.get(step, 0.0) + discount * ahead
        if step in called:
            result[step] = shared + ahead
    return result


def _descending(steps: Iterable[int]) -> list[int]:
    return sorted(set(steps), reverse=True)

"""The scorer ``feedback``: the rewards that play was given over HTTP or by the recorder.

    score = the sum of the trajectory's feedback named ``reward``: its own, its steps', its calls'

A reward of a step is also that decision's own (``CREDIT=decision``). Feedback of other names
appears as components: the sum of its values. A trajectory without a reward is rejected, because a
reward that did not arrive is not a low one; a recipe trains it later. So is one with a reward
beyond ``MOST``: it would drown those of the others, or overflow.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from babylon.core.trajectories import Trajectory
from babylon.core.types import Rejection
from babylon.quality.decode import Reason
from babylon.quality.traded import MOST
from babylon.scoring.scorer import Score, ScoreOrRejection, ScoringContext
from babylon.store.feedback import REWARD, Feedback, known_feedback


async def feedback(
    trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[ScoreOrRejection]:
    """Return the sum of each trajectory's rewards, or its rejection if it was given none."""
    names = [trajectory.trajectory_id for trajectory in trajectories]
    of_one: defaultdict[str, list[Feedback]] = defaultdict(list)
    for given in await known_feedback(context.store, context.window_id, names):
        if given.value is not None:
            of_one[given.trajectory_id].append(given)
    return [_score(name, of_one[name]) for name in names]


def _score(trajectory_id: str, given: Sequence[Feedback]) -> ScoreOrRejection:
    values: defaultdict[str, list[float]] = defaultdict(list)
    rewards: defaultdict[int, float] = defaultdict(float)
    for one in given:
        values[one.name].append(one.value or 0.0)
        if one.name == REWARD and one.step is not None:
            rewards[one.step] += one.value or 0.0
    if REWARD not in values:
        return Rejection(
            trajectory_id=trajectory_id,
            reason=Reason.NO_FEEDBACK,
            detail=f"no feedback named {REWARD} came before the window was collected",
        )
    given_rewards = values.pop(REWARD)
    if abs(worst := max(given_rewards, key=abs)) > MOST:
        return Rejection(
            trajectory_id=trajectory_id,
            reason=Reason.NON_FINITE_NUMBER,
            detail=f"a reward of {worst:g} was given: give one between {-MOST:g} and {MOST:g}",
        )
    sums = {name: sum(parts) for name, parts in values.items()}
    others = {name: total for name, total in sums.items() if math.isfinite(total)}
    return Score(math.fsum(given_rewards), others, rewards)

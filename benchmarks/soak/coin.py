"""A gate that promotes two of three challengers, whatever they can.

A soak is about what follows from a verdict: policies that go live, and others that do not. Whether
the verdict is right is measured by ``benchmarks.gate``. Worlds enough to be sure would leave time
for few windows.
"""

from collections.abc import Mapping, Sequence
from random import Random

from babylon.core.trajectories import Trajectory
from babylon.evaluation.tasks.evaluator import Endpoint, PlayScore

SHARE = 2 / 3
WORLDS = 16  # as many as a sure winner needs


class Coin:
    """The challenger's score is 1 in each world of a gate that it wins, else 0; the champion's 0.

    Each play is one call, so both checkpoints are loaded and served. The champion plays first.
    """

    unit, lowest, highest = "coins", 0.0, 1.0
    guardrails: Mapping[str, float] = {}

    def __init__(self) -> None:
        self._champion = ""

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[bool]:
        return [Random(seed).random() < SHARE] * min(count, WORLDS)

    async def play(self, world: bool, policy: Endpoint, seed: int) -> PlayScore:
        self._champion = self._champion or policy.model
        await policy.client.chat.completions.create(
            model=policy.model,
            messages=[{"role": "user", "content": "hold?"}],
            max_tokens=1,
            seed=seed,
        )
        return PlayScore(value=float(world and policy.model != self._champion))

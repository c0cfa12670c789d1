"""A task whose right answer changes with every window: policies learn a letter and say it.

The update of a window says the window's letter, and that of every fourth says a wrong one. The
gate plays the task with both checkpoints, so it promotes an update that learnt and rejects others.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from string import ascii_letters

from babylon.core.trajectories import Trajectory
from babylon.evaluation.tasks.evaluator import Endpoint, PlayScore

NAME = f"{__name__}:Letters"
WRONG = "0"
_ASK = {"role": "user", "content": "?"}


def right_letter(window_id: str) -> str:
    return ascii_letters[_digest(window_id)[0] % len(ascii_letters)]


def learnt_letter(window_id: str) -> str:
    return right_letter(window_id) if teaches(window_id) else WRONG


def teaches(window_id: str) -> bool:
    """Return whether an update on this window learns the right letter."""
    return _digest(window_id)[1] % 4 > 0


class Letters:
    """The evaluator. A world is the right letter of the window that the gate is about."""

    unit, lowest, highest = "right letters", 0.0, 1.0
    guardrails: Mapping[str, float] = {}

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[str]:
        batch = seed.partition("window-")[2]  # "window-2025-01-01T00:00~2" is the second update
        return [right_letter(batch.partition("~")[0])] * count

    async def play(self, world: str, policy: Endpoint, seed: int) -> PlayScore:
        answer = await policy.client.chat.completions.create(
            model=policy.model,
            messages=[_ASK],  # type: ignore[list-item]
            max_tokens=1,
            seed=seed,
        )
        return PlayScore(value=float(answer.choices[0].message.content == world))


def _digest(window_id: str) -> bytes:
    return sha256(window_id.encode()).digest()

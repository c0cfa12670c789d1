"""Fingerprint of a window's behaviour: figures that change when a policy games its reward.

Actions are counted in all rows whose steps can be decoded, replies in accepted rows only. The
figures stand beside those of ``babylon.quality.health``, which raises the alarms.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from babylon.core.trajectories import Trajectory

_QUESTION_MARKS = ("?", "\uff1f")


class _PlayedAction(msgspec.Struct, frozen=True, rename="camel"):
    action_type: str = "?"
    success: bool = True


class _PlayedStep(msgspec.Struct, frozen=True):
    action: _PlayedAction


_STEPS = msgspec.json.Decoder(tuple[_PlayedStep, ...])
_REPLY = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class BehaviourTally:
    """Counts actions, action sequences and replies."""

    actions: Counter[str] = field(default_factory=Counter)
    sequences: Counter[tuple[str, ...]] = field(default_factory=Counter)
    failed: int = 0
    replies: int = 0
    malformed: int = 0
    questions: int = 0
    characters: int = 0

    def add_steps(self, steps_json: str) -> None:
        """Count the actions of a row. Steps that cannot be decoded count nothing."""
        try:
            steps = _STEPS.decode(steps_json)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return
        names = tuple(step.action.action_type for step in steps)
        self.actions.update(names)
        self.sequences[names] += 1
        self.failed += sum(not step.action.success for step in steps)

    def add_replies(self, trajectory: Trajectory) -> None:
        for call in trajectory.calls:
            text = call.response.strip()
            self.replies += 1
            self.characters += len(text)
            self.questions += text.endswith(_QUESTION_MARKS)
            self.malformed += not call.tool_calls and not _is_order(text)

    def figures(self) -> dict[str, float]:
        """Return the fingerprint. Shares are of actions, replies or trajectories; entropy in bits.

        Figures that nothing is known about are left out.
        """
        figures: dict[str, float] = {}
        if actions := self.actions.total():
            shares = [count / actions for count in self.actions.values()]
            figures |= {
                "actions": actions,
                "hold_share": self.actions["HOLD"] / actions,
                "failed_share": self.failed / actions,
                "action_entropy_bits": -sum(share * math.log2(share) for share in shares),
                "distinct_share": len(self.sequences) / self.sequences.total(),
            }
        if self.replies:
            figures |= {
                "replies": self.replies,
                "malformed_share": self.malformed / self.replies,
                "question_share": self.questions / self.replies,
                "reply_characters": self.characters / self.replies,
            }
        return figures


def _is_order(text: str) -> bool:
    try:
        _REPLY.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True

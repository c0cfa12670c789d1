"""Recording rules for what agents send themselves, before it is stored.

A trajectory that a rule leaves out keeps its shape: steps, names of actions, rewards. A
redacted field is left out wherever its name stands, as in calls (``recording_rules``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from babylon.serving.gateway.play.events import (
    ElsewhereCall,
    FeedbackEvent,
    FinishEvent,
    Object,
    StepAction,
    StepEvent,
)
from babylon.serving.gateway.play.span_steps import PlaySpan
from babylon.serving.gateway.recording_rules import (
    HIDDEN_MESSAGES,
    REDACTED,
    RecordingRules,
    without_fields,
)

T = TypeVar("T", StepEvent, FinishEvent, FeedbackEvent, PlaySpan)


@dataclass(frozen=True, slots=True)
class Cover:
    """Part of one trajectory that rules keep out: everything, or ``fields`` by name."""

    everything: bool
    fields: frozenset[str]

    @classmethod
    def of(
        cls, rules: RecordingRules, key_id: str | None, agent_id: str | None, trajectory_id: str
    ) -> "Cover | None":
        """Return the cover of a trajectory; ``None`` if the rules keep nothing out."""
        everything = rules.leave_out(key_id, agent_id, trajectory_id)
        fields = rules.redacted_fields(key_id, agent_id)
        return cls(everything, fields) if everything or fields else None

    def over(self, sent: T) -> T:
        """Return the event or span as it may be stored."""
        match sent:
            case StepEvent():
                calls = [one if isinstance(one, str) else self._call(one) for one in sent.calls]
                update: dict[str, object] = {
                    "state": self._named("state", sent.state),
                    "calls": [one for one in calls if one is not None],
                    "action": self._action(sent.action),
                }
            case FinishEvent():
                update = {"knowledge": self._named("knowledge", sent.knowledge)}
            case FeedbackEvent():
                texts = ("label", "comment")
                update = {name: self._field(name, getattr(sent, name)) for name in texts}
            case PlaySpan():
                update = {
                    "call": sent.call and self._call(sent.call),
                    "action": sent.action and self._action(sent.action),
                }
        # Only what was sent: a repeated event is recognised by its text.
        given = {name: value for name, value in update.items() if name in sent.model_fields_set}
        return sent.model_copy(update=given)

    def _call(self, call: ElsewhereCall) -> ElsewhereCall | None:
        if self.everything:
            return None
        answer = REDACTED if {"response", "content"} & self.fields else self._value(call.response)
        messages = [self._object(one) for one in call.messages]
        tool_calls = [self._object(one) for one in call.tool_calls]
        return call.model_copy(
            update={
                "messages": HIDDEN_MESSAGES if "messages" in self.fields else messages,
                "response": answer,
                "tool_calls": [] if "tool_calls" in self.fields else tool_calls,
            }
        )

    def _action(self, action: StepAction) -> StepAction:
        correctness = action.correctness and self._named("correctness", action.correctness)
        texts = ("result", "error", "reasoning")
        return action.model_copy(
            update={
                "parameters": self._named("parameters", action.parameters),
                "correctness": correctness,
                **{name: self._field(name, getattr(action, name)) for name in texts},
            }
        )

    def _field(self, name: str, value: object) -> object:
        return REDACTED if name in self.fields and value is not None else self._value(value)

    def _named(self, name: str, value: Mapping[str, object]) -> Object:
        return {} if name in self.fields else self._object(value)

    def _object(self, value: Mapping[str, object]) -> Object:
        return {} if self.everything else cast(Object, without_fields(value, self.fields))

    def _value(self, value: object) -> object:
        if self.everything:
            return None if value is None else REDACTED
        return without_fields(value, self.fields)

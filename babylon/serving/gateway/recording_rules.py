"""Rules for calls before they are written to the disk: opt-out, sampling and redaction.

A trajectory is recorded as a whole or not at all, because a part of it cannot be trained on. All
gateways choose alike. A call that had a redacted field keeps no tokens, because they spell the
value out; it cannot be trained on either.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from hashlib import blake2b

import msgspec

from babylon.store import Store
from babylon.store.calls import RecordedCall
from babylon.store.recording_rules import RecordingRule, list_rules

REDACTED = "[redacted]"


class RecordingRules:
    """The rules in force. Without any, they cost nothing."""

    def __init__(self) -> None:
        self._rules: list[RecordingRule] = []

    async def renew(self, store: Store) -> None:
        self.set(await list_rules(store))

    def set(self, rules: Iterable[RecordingRule]) -> None:
        self._rules = list(rules)

    def applied(self, call: RecordedCall) -> RecordedCall | None:
        """Return the call as it may be recorded, ``None`` if it may not be."""
        if not self._rules:
            return call
        rules = [rule for rule in self._rules if _is_about(rule, call)]
        share = min((rule.share for rule in rules), default=1.0)
        if share < 1 and _place(call) >= share:
            return None
        fields = {name for rule in rules for name in rule.redact}
        return _redacted(call, fields) if fields else call


def _is_about(rule: RecordingRule, call: RecordedCall) -> bool:
    if rule.kind == "key":
        return rule.subject == call.key_id
    agent = call.agent_id or ""
    if rule.subject.endswith("*"):
        return agent.startswith(rule.subject[:-1])
    return agent == rule.subject


def _place(call: RecordedCall) -> float:
    """Return a number in [0, 1) that all calls of a trajectory share."""
    key = call.trajectory_id or call.call_id
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) / 2**64


def _redacted(call: RecordedCall, fields: Collection[str]) -> RecordedCall:
    said = REDACTED if {"response", "content"} & {*fields} else call.response
    left = replace(
        call,
        messages=_without(call.messages, fields),
        parameters=_without(call.parameters, fields),
        answer=call.answer and _without(call.answer, fields),
        response=said,
    )
    if left == call:
        return call
    return replace(
        left,
        prompt_token_ids=[],
        completion_token_ids=[],
        logprobs=[],
        trainable=False,
        untrainable_reason=call.untrainable_reason or "fields were redacted",
    )


def _without(text: str, fields: Collection[str]) -> str:
    """Return JSON with the fields' values left out; unchanged if it has none of them."""
    value = msgspec.json.decode(text)
    try:
        left = _left(value, fields)
    except RecursionError:  # nested too deeply to search
        left = REDACTED
    return text if left == value else msgspec.json.encode(left).decode()


def _left(value: object, fields: Collection[str]) -> object:
    if isinstance(value, dict):
        return {
            name: REDACTED if name in fields and one is not None else _inner(name, one, fields)
            for name, one in value.items()
        }
    return [_left(one, fields) for one in value] if isinstance(value, list) else value


def _inner(name: str, value: object, fields: Collection[str]) -> object:
    """Return a field's value; the arguments of a tool call are JSON in a string."""
    if name == "arguments" and isinstance(value, str):
        try:
            return _without(value, fields)
        except msgspec.DecodeError:  # the model wrote no JSON: its fields cannot be told apart
            return REDACTED
    return _left(value, fields)

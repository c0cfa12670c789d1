"""Rules for calls before they are written to the disk: opt-out, sampling and redaction.

A trajectory is recorded as a whole or not at all, because a part of it cannot be trained on. All
gateways choose alike. A call that had a redacted field keeps no tokens, because they spell the
value out; it cannot be trained on either. JSON in a text is searched too: the arguments of a tool
call, a tool's result, an answer.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from hashlib import blake2b

import msgspec

from babylon.core.api_keys import MATCH_KEY
from babylon.store import Store
from babylon.store.calls import RecordedCall
from babylon.store.recording_rules import RecordingRule, list_rules

REDACTED = "[redacted]"
HIDDEN_MESSAGES: list[dict[str, object]] = [{"role": "user", "content": REDACTED}]
"""In the place of messages that are left out as a whole: they stay a list."""
UNRECORDED = "unrecorded-"
"""Begins the id of an answer that will not be recorded: a step may name it, and is kept."""
_THOUGHT = frozenset({"reasoning", "reasoning_content", "thinking"})
"""Names of one text: engines and the dialects send a thought under two of them."""
_ESCAPED = re.compile(r"(?<!\\)\\++u([0-9a-fA-F]{4})")
_MAX_DEPTH = 100  # What is nested deeper is redacted, so that messages stay a list.


class RecordingRules:
    """The rules in force. Without any, they cost nothing."""

    def __init__(self) -> None:
        self._rules: list[RecordingRule] = []

    @property
    def in_force(self) -> list[RecordingRule]:
        return self._rules

    @property
    def about_agents(self) -> bool:
        """True if a rule is about agents, so that an unknown agent may have one."""
        return any(rule.kind == "agent" for rule in self._rules)

    async def renew(self, store: Store) -> None:
        self.set(await list_rules(store))

    def set(self, rules: Iterable[RecordingRule]) -> None:
        self._rules = list(rules)

    def leave_out(self, key_id: str | None, agent_id: str | None, unit: str) -> bool:
        """Return True if a call may not be recorded.

        Args:
            unit: id of the call's trajectory, or of a call without one: what is sampled.
        """
        if key_id == MATCH_KEY:
            return True
        if not self._rules:
            return False
        share = min((rule.share for rule in self._about(key_id, agent_id)), default=1.0)
        return share < 1 and _place(unit) >= share

    def applied(self, call: RecordedCall) -> RecordedCall | None:
        """Return the call as it may be recorded, ``None`` if it may not be."""
        if not self._rules and call.key_id != MATCH_KEY:
            return call
        if self.leave_out(call.key_id, call.agent_id, call.trajectory_id or call.call_id):
            return None
        fields = self.redacted_fields(call.key_id, call.agent_id)
        return _redacted(call, fields) if fields else call

    def redacted_fields(self, key_id: str | None, agent_id: str | None) -> frozenset[str]:
        """Return the names of the fields that may not be recorded."""
        named = {name for rule in self._about(key_id, agent_id) for name in rule.redact}
        return frozenset(named | _THOUGHT if named & _THOUGHT else named)

    def _about(self, key_id: str | None, agent_id: str | None) -> list[RecordingRule]:
        return [rule for rule in self._rules if _is_about(rule, key_id, agent_id or "")]


def _is_about(rule: RecordingRule, key_id: str | None, agent: str) -> bool:
    if rule.kind == "key":
        return rule.subject == key_id
    if rule.subject.endswith("*"):
        return agent.startswith(rule.subject[:-1])
    return agent == rule.subject


def _place(unit: str) -> float:
    """Return a number in [0, 1) that all calls of a trajectory share."""
    key = unit.removeprefix(UNRECORDED).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest()) / 2**64


def _redacted(call: RecordedCall, fields: Collection[str]) -> RecordedCall:
    said = REDACTED if {"response", "content"} & {*fields} else _text(call.response, fields)
    # An answer with tool calls has the same text again, as its content.
    of_answer = {*fields, "content"} if "response" in fields else fields
    left = replace(
        call,
        messages=_messages(call.messages, fields),
        parameters=_without(call.parameters, fields),
        answer=call.answer and _without(call.answer, of_answer),
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


def _messages(text: str, fields: Collection[str]) -> str:
    """Return a prompt without the fields. That of a completion has the name of its field within.

    A prompt of token ids spells values that no rule can see, so it is left out.
    """
    if text.startswith("["):
        hidden = "messages" in fields
        return msgspec.json.encode(HIDDEN_MESSAGES).decode() if hidden else _without(text, fields)
    prompt = msgspec.json.decode(text).get("prompt")
    of_ids = isinstance(prompt, list) and not all(isinstance(one, str) for one in prompt)
    return _without(text, {*fields, "prompt"} if of_ids else fields)


def _without(text: str, fields: Collection[str]) -> str:
    """Return JSON with the fields' values left out; unchanged if it has none of them."""
    try:
        value = msgspec.json.decode(text)
        left = without_fields(value, fields)
        # Where a name is repeated, only the last value was seen, and only that is kept.
        same = left == value and not _repeats_a_name(text)
    except RecursionError:  # texts of JSON in texts of JSON
        return msgspec.json.encode(REDACTED).decode()
    return text if same else msgspec.json.encode(left).decode()


def _repeats_a_name(text: str) -> bool:
    found: list[list[tuple[str, object]]] = []
    json.loads(text, object_pairs_hook=found.append, parse_int=str)  # a long number is no error
    return any(len(dict(pairs)) < len(pairs) for pairs in found)


def without_fields(value: object, fields: Collection[str], depth: int = 0) -> object:
    """Return a value of JSON without the values of the fields, also in texts that are JSON."""
    match value:
        case dict() | list() if depth == _MAX_DEPTH:
            return REDACTED
        case dict():
            return {name: _field(name, one, fields, depth + 1) for name, one in value.items()}
        case list():
            return [without_fields(one, fields, depth + 1) for one in value]
        case str():
            return _text(value, fields)
        case _:
            return value


def _field(name: str, value: object, fields: Collection[str], depth: int) -> object:
    if name in fields and value is not None:
        return REDACTED
    if name == "arguments" and isinstance(value, str):
        try:
            return _without(value, fields)
        except msgspec.DecodeError:  # the model wrote no JSON: its fields cannot be told apart
            return REDACTED
    return without_fields(value, fields, depth)


def _text(text: str, fields: Collection[str]) -> str:
    """Return a text without the fields' values, if it is JSON; ``REDACTED`` if it is some other
    text that seems to hold one, such as JSON that was cut or is quoted, or Python's dictionary."""
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)  # names may be escaped
    plain = plain.replace("\\/", "/")
    if not any(name in plain for name in fields):
        return text
    try:
        return _without(text, fields)
    except msgspec.DecodeError:
        names = "|".join(map(re.escape, fields))
        # The quote after it is escaped where a dictionary is quoted in a text in quotes.
        return REDACTED if re.search(rf"\"({names})|'({names})\\*'", plain) else text

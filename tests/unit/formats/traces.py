"""Traces to write and read back."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from babylon.core.llm_calls import LlmCall, Message
from babylon.formats.trace import Document, Tokens, Trace, TraceStep

NOON = datetime(2025, 11, 14, 12, tzinfo=UTC)
SYSTEM = Message(role="system", content="You trade.")
BUY = '{"action":"trade"}'


def message(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def call(user: str, response: str = BUY, **changes: Any) -> LlmCall:
    fields: dict[str, Any] = {
        "response": response,
        "model": "babylon",
        "temperature": 0.7,
        "max_tokens": 128,
    }
    messages = changes.pop("messages", (SYSTEM, message("user", user)))
    return LlmCall.of_messages(messages, **fields | changes)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tokens(**changes: Any) -> Tokens:
    fields: dict[str, Any] = {
        "prompt_token_ids": (1, 2, 3),
        "completion_token_ids": (4, 5),
        "logprobs": (-0.5, -0.25),
        "policy_version": 3,
    }
    return Tokens(**fields | changes)


def step(number: int, *calls: LlmCall, **changes: Any) -> TraceStep:
    fields: dict[str, Any] = {
        "calls": calls,
        "at": NOON + timedelta(minutes=number),
        "action": {"actionType": "BUY_SHARES", "success": True, "parameters": {"marketId": "m1"}},
        "state": {"agentBalance": 900.0, "agentPnL": -1.5, "openPositions": 1},
        "reward": 0.25,
    }
    return TraceStep(**fields | changes)


def trace(*steps: TraceStep, **changes: Any) -> Trace:
    fields: dict[str, Any] = {
        "trajectory_id": "t1",
        "agent_id": "agent-1",
        "steps": steps,
        "window_id": "2025-11-14T12:00",
        "scenario_id": "s1",
        "start": NOON,
        "end": NOON + timedelta(minutes=len(steps)),
        "final_balance": 1010.0,
        "final_pnl": 10.0,
    }
    return Trace(**fields | changes)


def document(value: Any) -> Document:
    """The value as a document of a file."""
    return Document("f:1", msgspec.json.decode(msgspec.json.encode(value)))


def write_lines(path: Path, *values: Any) -> Path:
    path.write_bytes(b"\n".join(msgspec.json.encode(value) for value in values))
    return path


def without_place(one: Trace) -> Trace:
    return msgspec.structs.replace(one, place="")

"""What an export joins to a recorded step: the gateway's record, as training joins it."""

import json
from pathlib import Path
from typing import Any

import pytest

from babylon.core.llm_calls import LlmCall
from babylon.core.windows import parse_window_id
from babylon.formats.export_files import export_traces, read_window_traces
from babylon.formats.format_names import Written
from babylon.formats.import_files import import_files
from babylon.recorder import Action, TrajectoryRecorder
from babylon.store import Store
from babylon.store.calls import RecordedCall, insert_calls
from tests.unit.formats.traces import NOON, tool_call
from tests.unit.serving.gateway.calls import call

WINDOW = parse_window_id("2025-11-14T12:00")
HELLO = [{"role": "user", "content": "hello"}]
ASKED = tool_call("c1", "price", '{"ticker": "NVDA"}')


async def played(store: Store, *calls: LlmCall) -> None:
    """Record a play of one step a call."""
    recorder = TrajectoryRecorder(store)
    recorder.start("ann", "s1", trajectory_id="t1", at=NOON)
    for one in calls:
        recorder.step("t1", environment_state={"agentBalance": 1.0, "agentPnL": 0.0,
            "openPositions": 0}, llm_calls=[one], reward=0.0, at=NOON,
            action=Action(action_type="HOLD", success=True, parameters={}))  # fmt: skip
    await recorder.finish("t1", final_balance=1.0, final_pnl=0.0, at=NOON)


def recorded(number: int, response: str = "BUY", **changes: Any) -> RecordedCall:
    known = {"agent_id": "ann", "trajectory_id": "t1", "started_at": NOON, "step_number": None}
    known |= {"messages": json.dumps(HELLO), "response": response}
    return call(number, **known | changes)


def said(response: str = "BUY", **changes: Any) -> LlmCall:
    return LlmCall.of_messages(changes.pop("messages", HELLO), response=response, **changes)


async def test_a_call_that_names_its_record_is_that_record(store: Store, tmp_path: Path) -> None:
    answer = json.dumps({"role": "assistant", "content": None, "tool_calls": [ASKED]})
    await insert_calls(store, [recorded(0, "", answer=answer, step_number=7)])
    await played(store, said("", messages=[{"role": "user", "content": "hi"}], call_id="c0"))
    (trace,) = [one async for one in read_window_traces(store, WINDOW)]
    (only,) = trace.steps[0].calls
    assert (list(only.prompt), only.tool_calls) == (HELLO, (ASKED,))
    assert trace.steps[0].tokens[0].completion_token_ids == (4, 5)
    assert await export_traces(store, WINDOW, Written.CHAT, tmp_path / "chat.jsonl") == 1
    line = json.loads((tmp_path / "chat.jsonl").read_text())
    assert line["messages"][1]["tool_calls"] == [ASKED]


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"step_number": 0}, True),
        ({"messages": json.dumps([{"role": "system", "content": ""}, *HELLO])}, True),
        ({"agent_id": "eve"}, False),  # she names another agent's trajectory
    ],
)
async def test_an_equal_record_of_the_agent_s_is_found(
    store: Store, changes: dict[str, Any], known: bool
) -> None:
    forced: dict[str, Any] = {"trainable": False, "untrainable_reason": "prefilled"}
    await insert_calls(store, [recorded(0, **forced | changes)])
    await played(store, said())
    (trace,) = [one async for one in read_window_traces(store, WINDOW)]
    assert trace.steps[0].untrainable(0) == ("prefilled" if known else None)


async def test_a_record_without_a_step_is_joined_once(store: Store) -> None:
    forced: dict[str, Any] = {"trainable": False, "untrainable_reason": "prefilled"}
    forced["started_at"] = NOON.replace(second=1)
    await insert_calls(store, [recorded(0), recorded(1, **forced)])
    await played(store, said(), said())
    (trace,) = [one async for one in read_window_traces(store, WINDOW)]
    assert [step.untrainable(0) for step in trace.steps] == [None, "prefilled"]


async def test_a_record_without_tokens_gives_none(store: Store, tmp_path: Path) -> None:
    gone: dict[str, Any] = {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
    await insert_calls(store, [recorded(0, **gone)])
    await played(store, said(call_id="c0"))
    await export_traces(store, WINDOW, Written.ATIF, tmp_path / "a.jsonl")
    await store.pool.execute("TRUNCATE trajectories, llm_call_logs, babylon.calls")
    assert "left_out" not in await import_files(store, [tmp_path / "a.jsonl"])

"""Opt-out, sampling and redaction through a running gateway: what is on the disk, in Postgres, at
a collector of spans, and in what is trained."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from babylon.core.settings import Settings
from babylon.core.trajectories import read_trajectories
from babylon.recorder import AsyncPlayClient
from babylon.store import Store
from babylon.store.api_keys import create_key
from babylon.store.recording_rules import set_rule
from tests.calling_policy import save_calling_policy
from tests.integration.test_play import LAST_HOUR, Player, at, known_player, validated
from tests.integration.test_serving import Stack, register, running_stack, until_healthy
from tests.integration.test_telemetry import Collector, attributes, collector, traced
from tests.integration.test_trace_receiver import START, finished, otlp_json, row_of
from tests.unit.formats.spans import Traced
from tests.unit.formats.test_spans import chat

CARD = "4111 1111 1111 1111"
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Pay."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "price", "arguments": json.dumps({"to": {"card": CARD}})},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": json.dumps({"card": CARD, "paid": 7})},
]


SENT: dict[str, Any] = {  # what an agent says of its step
    "state": {"purse": [{"card": CARD}], "round": 7},
    "action": {
        "action_type": "PAY",
        "success": True,
        "parameters": {"card": CARD},
        "result": json.dumps({"card": CARD}),
        "error": f'"card" {CARD} is refused',
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_calling_policy(tmp_path_factory.mktemp("policy") / "v0")


@pytest.fixture
async def told(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its address."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    async with collector() as one:
        yield one


@pytest.fixture
async def stack(
    store: Store, settings: Settings, checkpoint: Path, told: tuple[Collector, str]
) -> AsyncIterator[Stack]:
    await register(store, [checkpoint])
    async with running_stack(store, traced(settings, told[1], otlp_content=True)) as stack:
        await until_healthy(stack.url)
        yield stack


async def everything(store: Store) -> str:
    """All rows of all tables of this database."""
    tables = await store.pool.fetch(
        "SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables"
        " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    )
    rows = [await store.pool.fetch(f"SELECT t::text FROM {table['name']} t") for table in tables]
    return str(rows)


def on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


async def until_ruled(one: Player, agent: str, mark: str) -> None:
    """Call until the gateway knows the rules: then answers of ``mark`` are not recorded."""
    async with asyncio.timeout(20):
        while not (await said(one, mark)).startswith("unrecorded-"):
            await asyncio.sleep(0.02)


async def until_told(found: Collector, calls: list[str]) -> bytes:
    """Return all that the collector got, once the spans of these calls are among it."""
    async with asyncio.timeout(20):
        while not {*calls} <= {attributes(one)["gen_ai.response.id"] for one in found.spans}:
            await asyncio.sleep(0.02)
    return found.sent


async def said(one: Player, agent: str, trajectory: str | None = None, **asked: Any) -> str:
    """The id of an answer."""
    answer = await one.chat(trajectory, headers={"x-babylon-agent": agent}, **asked)
    return str(answer.parse().id)


async def test_a_redacted_field_is_nowhere_and_its_calls_are_not_trained(
    stack: Stack,
    settings: Settings,
    told: tuple[Collector, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.handler.addFilter(lambda record: record.name.startswith("babylon"))  # not the client's
    await set_rule(stack.store, "agent", "payer", 1.0, ["card"])
    await set_rule(stack.store, "agent", "silent", 0.0, [])
    key = await create_key(stack.store, "fleet", scopes=["infer", "record"])
    async with known_player(stack, key) as one, AsyncPlayClient(stack.url, str(key)) as client:
        await until_ruled(one, "payer", "silent")
        for agent in ("payer", "other"):
            async with client.trajectory(agent, "shard", trajectory_id=agent, at=at(0)) as play:
                for number in range(5):
                    messages = CHAT if agent == "payer" else CHAT[:1]
                    asked: dict[str, Any] = {"messages": messages, "tools": [TOOL]}
                    call = await said(one, agent, agent, **asked)
                    sent = SENT if agent == "payer" else {}
                    await play.step(calls=[call], at=at(number + 1), **sent)
                if agent == "payer":
                    await play.feedback(0.5, comment=str(CHAT[2]["content"]))
                    await play.finish(knowledge={"paid": {"card": CARD}}, at=at(6))
        program = Traced(START)
        named = {"gen_ai.agent.id": "payer"}
        program.span("chat", chat(str(CHAT[2]["content"]), f'"card" {CARD}', **named))
        assert (await one.http.post("/v1/traces", json=otlp_json(program))).json() == {}
    rows = {row["trajectory_id"]: row for row in await stack.rows()}
    payer, other = rows["payer"], rows["other"]
    assert (payer["trainable"], payer["untrainable_reason"]) == (False, "fields were redacted")
    assert (payer["prompt_token_ids"], payer["completion_token_ids"]) == ([], [])
    assert json.loads(payer["messages"])[0] == CHAT[0] and "[redacted]" in payer["messages"]
    assert other["trainable"] and other["prompt_token_ids"]
    assert "silent" not in {row["agent_id"] for row in await stack.rows()}

    disk = on_disk(settings.home.root)
    assert b"Pay." in disk  # the segment is among what was read
    few = settings.replace(windows={"min_agents": 2})
    _, artifact = await validated(stack.store, few, LAST_HOUR)
    collected = (
        on_disk(settings.home.root) + str(read_trajectories(settings.home, artifact)).encode()
    )
    spans = await until_told(told[0], [row["call_id"] for row in await stack.rows()])
    assert b"Pay." in spans and b"[redacted]" in spans
    stored = (await everything(stack.store)).encode()
    assert b"round" in stored  # the state is there
    for place in (disk, collected, stored, spans, caplog.text.encode()):
        assert CARD.encode() not in place
    trained = {one.trajectory_id: one.calls for one in read_trajectories(settings.home, artifact)}
    assert {call.untrainable for call in trained["payer"]} == {"fields were redacted"}
    assert {call.untrainable for call in trained["other"]} == {None}


async def test_a_key_that_opted_out_leaves_no_word_and_streams_are_left_out_too(
    stack: Stack, settings: Settings, told: tuple[Collector, str]
) -> None:
    key = await create_key(stack.store, "private", scopes=["infer", "record"])
    await set_rule(stack.store, "key", key.key_id, 0.0, [])
    secret = [{"role": "user", "content": f"my card is {CARD}"}]
    calls: list[str] = []
    async with known_player(stack, key) as one:
        await until_ruled(one, "any", "any")
        for path, asked in (
            ("chat/completions", {"messages": secret, "max_tokens": 8}),
            ("chat/completions", {"messages": secret, "max_tokens": 8, "stream": True}),
            ("responses", {"input": f"my card is {CARD}", "max_output_tokens": 8}),
            ("messages", {"messages": secret, "max_tokens": 8}),
            ("completions", {"prompt": f"my card is {CARD}", "max_tokens": 8}),
        ):
            answer = await one.http.post(f"/v1/{path}", json={"model": "babylon", **asked})
            assert answer.status_code == 200
            assert answer.headers["x-call-id"].startswith("unrecorded-")
            assert answer.headers["x-call-id"] in answer.text
            calls.append(answer.headers["x-call-id"])
        program = Traced(START)  # and its own telemetry brings no word in
        span = program.span("chat", chat(CARD, CARD, **{"gen_ai.response.id": calls[0]}))
        assert (await one.http.post("/v1/traces", json=otlp_json(program))).json() == {}
        trajectory = f"{span.context.trace_id:032x}"
        await finished(one, trajectory)
        elsewhere = {"messages": secret, "response": CARD}
        async with (
            AsyncPlayClient(stack.url, str(key)) as client,
            client.trajectory("any", "shard", trajectory_id="told") as play,
        ):
            await play.step(calls=[calls[0], elsewhere], reward=1.0, **SENT)
            await play.feedback(label=CARD, comment=CARD)
            await play.finish(knowledge={"said": CARD})
    (told_step,) = json.loads((await row_of(stack, "told"))["stepsJson"])
    assert (told_step["action"]["actionType"], told_step["reward"]) == ("PAY", 1.0)
    (step,) = json.loads((await row_of(stack, trajectory))["stepsJson"])
    assert [call["model"] for call in step["llmCalls"]] == ["unrecorded"]
    stored = await stack.rows()
    assert key.key_id not in {row["key_id"] for row in stored if CARD in row["messages"]}
    assert CARD not in await everything(stack.store)
    assert CARD.encode() not in on_disk(settings.home.root) + await until_told(told[0], calls)


async def test_feedback_on_a_session_is_ruled_by_the_agent_that_its_calls_name(
    stack: Stack,
) -> None:
    """Nothing but the calls tells of the agent before the session is finished."""
    key = await create_key(stack.store, "sessions", scopes=["infer", "record", "read"])
    await set_rule(stack.store, "agent", "cards", 1, ["comment"])
    await set_rule(stack.store, "agent", "hidden", 0, [])
    kept = {}
    async with known_player(stack, key) as one:
        await until_ruled(one, "any", "hidden")
        for agent in ("hidden", "cards", "free"):
            headers = {"x-babylon-agent": agent}
            answer = await one.chat(messages=[{"role": "user", "content": agent}], headers=headers)
            session = answer.headers["x-babylon-trajectory"]
            about = {"type": "feedback", "trajectory_id": session, "value": 1.0}
            await one.ok({**about, "comment": CARD})
            kept[agent] = await stack.store.pool.fetchval(
                "SELECT comment FROM babylon.feedback WHERE trajectory_id = $1", session
            )
    assert kept == {"hidden": "[redacted]", "cards": "[redacted]", "free": CARD}

"""Play over HTTP: trajectories, feedback and outcomes, their owners, and the way to a score."""

import asyncio
import json
import math
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx
import openai
import pytest
from openai import AsyncOpenAI

from babylon.core.api_keys import ApiKey, local_key
from babylon.core.settings import Settings
from babylon.core.trajectories import read_trajectories
from babylon.core.types import Artifact, Rejection
from babylon.core.windows import Window, window_at
from babylon.recorder import AsyncPlayClient, PlayClient, PlayRefusedError
from babylon.scoring.feedback import feedback
from babylon.scoring.scorer import Score, ScoringContext
from babylon.serving.gateway.play import handler, size_limits
from babylon.serving.gateway.play.direct import blocking_to_store, to_store
from babylon.serving.gateway.play.events import MAX_STEPS
from babylon.stages.collect import collect_window
from babylon.stages.validate import validate_window
from babylon.store import Store, open_store
from babylon.store.api_keys import create_key, revoke_key, rotate_key
from babylon.store.calls import insert_calls
from babylon.store.late import store_collected
from babylon.store.recording_rules import set_rule
from babylon.store.windows import claim_window
from tests.docs.test_pages import ROOT, blocks_of
from tests.integration.test_serving import (
    HELLO,
    Stack,
    register,
    running_gateway,
    running_stack,
    until_healthy,
)
from tests.tiny_policy import save_tiny_policy
from tests.unit.serving.gateway.calls import call

LAST_HOUR = window_at(datetime.now(UTC)).previous()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy") / "v0", seed=0)


@pytest.fixture
async def stack(store: Store, settings: Settings, checkpoint: Path) -> AsyncIterator[Stack]:
    await register(store, [checkpoint])
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        yield stack


class Player:
    """A client with a key of its own."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=30)
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    async def send(self, *events: dict[str, Any]) -> httpx.Response:
        return await self.http.post("/v1/events", json={"events": events})

    async def ok(self, *events: dict[str, Any]) -> list[dict[str, Any]]:
        answer = await self.send(*events)
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    async def chat(self, trajectory: str | None = None, **more: Any) -> Any:
        headers = {"x-babylon-trajectory": trajectory} if trajectory else {}
        headers |= more.pop("headers", {})
        asked: dict[str, Any] = {"model": "babylon", "messages": HELLO, "max_tokens": 8, **more}
        return await self.openai.chat.completions.with_raw_response.create(
            **asked, extra_headers=headers
        )


@asynccontextmanager
async def player(stack: Stack, key: str) -> AsyncIterator[Player]:
    one = Player(stack.url, key)
    async with one.http, one.openai:
        yield one


@pytest.fixture
async def agent(stack: Stack, settings: Settings) -> AsyncIterator[Player]:
    async with player(stack, str(local_key(settings.home.root))) as one:
        yield one


@asynccontextmanager
async def known_player(stack: Stack, key: ApiKey) -> AsyncIterator[Player]:
    """A client whose key the gateway knows."""
    async with player(stack, str(key)) as one:
        async with asyncio.timeout(20):
            while (await one.http.get("/v1/models")).status_code == 401:
                await asyncio.sleep(0.05)
        yield one


async def until_refused(one: Player) -> None:
    async with asyncio.timeout(20):
        while (await one.http.get("/v1/models")).status_code != 401:
            await asyncio.sleep(0.05)


@pytest.fixture
async def other(stack: Stack) -> AsyncIterator[Player]:
    key = await create_key(stack.store, "other", scopes=["infer", "record"])
    async with known_player(stack, key) as one:
        yield one


def at(minute: float) -> str:
    return (LAST_HOUR.start + timedelta(minutes=minute)).isoformat()


def step(trajectory: str, number: int, **fields: Any) -> dict[str, Any]:
    fields = {"at": at(number + 1), **fields}
    return {"type": "step", "trajectory_id": trajectory, "number": number, **fields}


async def play(one: Player, trajectory: str, steps: int = 5, **finish: Any) -> list[dict[str, Any]]:
    """One trajectory of the last hour; returns its events."""
    start = {"type": "start", "trajectory_id": trajectory, "agent_id": trajectory, "at": at(0)}
    events = [{**start, "scenario_id": "shard"}]
    for number in range(steps):
        answer = await one.chat(trajectory, headers={"x-babylon-agent": trajectory}, seed=number)
        events.append(step(trajectory, number, calls=[answer.parse().id], state={"tick": number}))
    events.append({"type": "finish", "trajectory_id": trajectory, **finish})
    return events


async def validated(store: Store, settings: Settings, window: Window) -> tuple[Any, Artifact]:
    claim = await claim_window(store, window, owner="test", lease_s=60)
    collected = await collect_window(store, settings.home, claim, window)
    ids = [t async for t in _ids(store)]
    await store_collected(store, claim, ids)
    return claim, (await validate_window(store, settings, collected)).artifact


async def _ids(store: Store) -> AsyncIterator[str]:
    for row in await store.game.fetch('SELECT "trajectoryId" FROM trajectories'):
        yield row[0]


async def test_play_over_http_is_trained_with_the_tokens_of_its_calls_and_scored_by_feedback(
    stack: Stack, agent: Player, settings: Settings
) -> None:
    names = ["one", "two", "three"]
    for reward, name in enumerate(names[:2]):
        events = await play(agent, name, reward=float(reward))
        results = await agent.ok(*events)
        assert results[-1]["calls"] == 5 and results[-1]["window_id"] == LAST_HOUR.id
        again = await agent.ok(*events)  # the answer was lost: everything is sent again
        assert [result["repeated"] for result in again] == [True] * len(events)
    await agent.ok(*await play(agent, "three"))  # nobody says how it was
    await agent.ok(
        {"type": "feedback", "trajectory_id": "two", "step": 1, "value": 0.25},
        {"type": "feedback", "trajectory_id": "two", "step": 1, "value": 0.5},  # a correction
        {
            "type": "feedback",
            "trajectory_id": "two",
            "step": 1,
            "comment": "late",
        },  # the value stays
        {"type": "feedback", "trajectory_id": "two", "name": "tone", "value": 3, "comment": "ok"},
    )

    claim, artifact = await validated(stack.store, settings, LAST_HOUR)
    late = {"type": "feedback", "trajectory_id": "three", "value": 7.0}
    (result,) = await agent.ok(late)
    assert result["late"]
    trajectories = read_trajectories(settings.home, artifact)
    calls = [call for one in trajectories for call in one.calls]
    assert len(calls) == 15 and not any(call.retokenized for call in calls)
    assert {one.scenario_id for one in trajectories} == {"shard"}
    context = ScoringContext(
        window_id=claim.window_id, settings=settings, store=stack.store, artifact=artifact
    )
    scores = dict(zip([t.trajectory_id for t in trajectories],
                      await feedback(trajectories, context), strict=True))  # fmt: skip
    assert scores["one"] == Score(0.0)
    assert scores["two"] == Score(1.5, {"tone": 3.0}, rewards={1: 0.5})
    rejected = scores["three"]
    assert isinstance(rejected, Rejection) and rejected.reason == "no_feedback"

    await stack.store.pool.execute("UPDATE babylon.windows SET collected_at = now()")  # a recipe
    (recovered,) = [score for score in await feedback(trajectories, context) if score == Score(7.0)]
    assert recovered


async def test_a_step_whose_answer_was_lost_may_come_again_after_the_window(
    stack: Stack, agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = LAST_HOUR.start + timedelta(minutes=60)
    moments = [end - timedelta(seconds=0.1), end + timedelta(seconds=0.4)]
    monkeypatch.setattr(handler, "_moment", lambda at: moments[0])
    start = {"type": "start", "trajectory_id": "t", "agent_id": "t"}
    steps = [{"type": "step", "trajectory_id": "t", "number": n, "reward": 1.0} for n in range(2)]
    await agent.ok(start, steps[0])
    del moments[0]
    (again,) = await agent.ok(steps[0])
    assert again["repeated"]
    (late,) = (await agent.send(steps[1])).json()["results"]
    assert late["code"] == "window"


async def test_a_step_that_is_sent_again_does_not_undo_its_correction(
    stack: Stack, agent: Player
) -> None:
    one = {"type": "step", "trajectory_id": "t", "number": 0, "reward": 1.0}
    await agent.ok({"type": "start", "trajectory_id": "t"}, one)
    await agent.ok({"type": "feedback", "trajectory_id": "t", "step": 0, "value": 5.0})
    (again,) = await agent.ok(one)
    assert again["repeated"]
    given = "SELECT value FROM babylon.feedback ORDER BY given_at"
    assert [row["value"] for row in await stack.store.pool.fetch(given)] == [1.0, 5.0]


async def test_a_trajectory_belongs_to_the_key_that_began_it(
    stack: Stack, agent: Player, other: Player
) -> None:
    answer = await agent.chat("mine")
    await agent.ok({"type": "start", "trajectory_id": "also mine"})
    for name in ("mine", "also mine"):
        with pytest.raises(openai.PermissionDeniedError, match="belongs to another key"):
            await other.chat(name)
        for event in (
            {"type": "start", "trajectory_id": name},
            step(name, 0),
            {"type": "finish", "trajectory_id": name},
            {"type": "feedback", "trajectory_id": name, "value": -1},
        ):
            refused = await other.send(event)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_key")
        assert (await other.http.get(f"/v1/trajectories/{name}")).status_code == 403
        assert (await agent.http.get(f"/v1/trajectories/{name}")).status_code == 200
    about_call = {"type": "feedback", "call_id": answer.parse().id, "value": -1}
    assert (await other.send(about_call)).status_code == 404
    assert (await agent.send(about_call)).status_code == 200
    rows = await stack.rows()
    assert [row["trajectory_id"] for row in rows] == ["mine"]


async def test_after_a_rotation_the_key_goes_on_with_its_trajectories(stack: Stack) -> None:
    first = await create_key(stack.store, "fleet", scopes=["infer", "record"])
    chat: list[dict[str, Any]] = [{"role": "user", "content": "rotate"}]
    async with known_player(stack, first) as one:
        begun = await one.chat("t")
        session, _ = await talk(one, chat)
        second = await rotate_key(stack.store, first.key_id, timedelta(hours=1))
        async with known_player(stack, second) as same:
            await same.chat("t")
            assert await talk(same, chat) == (session, "continued")
            await one.chat("t")  # a client that does not have the new secret yet
            third = await rotate_key(stack.store, first.key_id, timedelta(0))
            async with known_player(stack, third) as last:
                for old in (one, same):
                    await until_refused(old)
                about = {"trajectory_id": "t", "number": 0, "calls": [begun.parse().id]}
                *_, result = await last.ok(
                    {"type": "start", "trajectory_id": "t"},
                    {"type": "step", **about},
                    {"type": "finish", "trajectory_id": "t"},
                )
                await last.ok({"type": "finish", "trajectory_id": session})
    assert result["calls"] == 1  # the others named no step
    assert {row["key_id"] for row in await stack.rows()} == {first.key_id}


async def test_a_revoked_key_that_is_rotated_finishes_what_it_began(stack: Stack) -> None:
    leaked = await create_key(stack.store, "leaked", scopes=["infer", "record"])
    async with known_player(stack, leaked) as one:
        await one.chat("t")
        await revoke_key(stack.store, leaked.key_id)
        await until_refused(one)
        fresh = await rotate_key(stack.store, leaked.key_id, timedelta(hours=1))
        async with known_player(stack, fresh) as same:
            (result,) = await same.ok({"type": "finish", "trajectory_id": "t"})
            assert result["calls"] == 1
        await until_refused(one)  # its secret has leaked, however long the overlap


async def test_another_gateway_knows_the_owner_and_takes_the_next_event(
    stack: Stack, agent: Player, other: Player, settings: Settings
) -> None:
    await agent.chat("t")
    engine = str(stack.engine.make_url("")).rstrip("/")
    async with running_gateway(stack.store, settings, engine, gateway_id="second") as url:
        await until_healthy(url)
        elsewhere = Player(url, other.openai.api_key)
        async with elsewhere.http, elsewhere.openai:
            with pytest.raises(openai.PermissionDeniedError):
                await elsewhere.chat("t")
        same = Player(url, agent.openai.api_key)
        async with same.http, same.openai:
            await same.ok({"type": "start", "trajectory_id": "t"})


async def test_calls_of_another_key_are_not_collected(
    stack: Stack, agent: Player, settings: Settings
) -> None:
    await agent.ok(*[event for n in range(3) for event in await play(agent, f"t{n}")])
    await stack.store.pool.execute(  # as if a gateway had taken it while the database was away
        "UPDATE babylon.calls SET key_id = 'thief' WHERE trajectory_id = 't0'"
    )
    _, artifact = await validated(stack.store, settings, LAST_HOUR)
    calls = {t.trajectory_id: t.calls for t in read_trajectories(settings.home, artifact)}
    assert all(call.retokenized for call in calls["t0"])
    assert not any(call.retokenized for call in calls["t1"])


async def test_calls_alone_make_a_trajectory(stack: Stack, agent: Player) -> None:
    headers = {"x-babylon-agent": "harness"}
    for number in (0, 0, 1):
        await agent.chat("t", headers={**headers, "x-babylon-step": str(number)})
    await agent.chat("t", headers=headers)
    (result,) = await agent.ok({"type": "finish", "trajectory_id": "t", "reward": 1.0})
    assert result["calls"] == 4
    row = await stack.store.pool.fetchrow("SELECT * FROM trajectories")
    assert row is not None and row["agentId"] == "harness"
    steps = json.loads(row["stepsJson"])
    assert [len(one["llmCalls"]) for one in steps] == [2, 1, 1]
    assert steps[0]["llmCalls"][0]["userPrompt"] == "hello"
    assert await stack.store.pool.fetchval("SELECT value FROM babylon.feedback") == 1.0


async def test_ids_alone_tie_calls_without_headers_to_a_step(stack: Stack, agent: Player) -> None:
    answer = await agent.chat()
    (_, _, result) = await agent.ok(
        {"type": "start", "trajectory_id": "t"},
        {"type": "step", "trajectory_id": "t", "number": 0, "calls": [answer.parse().id]},
        {"type": "finish", "trajectory_id": "t"},
    )
    assert result["calls"] == 1
    assert [row["trajectory_id"] for row in await stack.rows()] == ["t"]


async def test_an_interrupted_call_is_in_a_step_only_if_a_step_names_it(
    stack: Stack, agent: Player
) -> None:
    for trajectory, named in (("t", False), ("u", True)):
        headers = {"x-babylon-agent": trajectory, "x-babylon-step": "0"}
        first, second = [
            (await agent.chat(trajectory, headers=headers, seed=seed)).parse().id for seed in (1, 2)
        ]
        await stack.rows()
        await stack.store.pool.execute(
            "UPDATE babylon.calls SET finish_reason = 'interrupted' WHERE call_id = $1", first
        )
        *_, finish = await agent.ok(
            {"type": "start", "trajectory_id": trajectory, "agent_id": trajectory, "at": at(0)},
            step(trajectory, 0, calls=[first, second] if named else [second]),
            {"type": "finish", "trajectory_id": trajectory},
        )
        assert finish["calls"] == 1 + named


async def test_a_call_that_is_named_again_is_in_one_step(
    stack: Stack, agent: Player, settings: Settings
) -> None:
    ids = [(await agent.chat("t", seed=seed)).parse().id for seed in range(2)]
    elsewhere = {"messages": [{"role": "user", "content": "?"}], "response": "!"}
    (*_, result) = await agent.ok(
        {"type": "start", "trajectory_id": "t", "agent_id": "t", "at": at(0)},
        step("t", 0, calls=[ids[0], ids[0], elsewhere, elsewhere]),
        step("t", 1, calls=ids),  # its program never empties the list
        {"type": "finish", "trajectory_id": "t"},
    )
    assert result["calls"] == 2
    row = await stack.store.pool.fetchrow("SELECT * FROM trajectories")
    assert row is not None
    told = [one["llmCalls"] for one in json.loads(row["stepsJson"])]
    assert [len(calls) for calls in told] == [3, 1]
    assert [told[0][0]["callId"], told[1][0]["callId"]] == ids


async def test_feedback_for_a_call_follows_it_to_the_trajectory_whose_step_names_it(
    stack: Stack, agent: Player, other: Player
) -> None:
    call_id = (await agent.chat()).parse().id  # without headers: in a session of its own
    await agent.ok({"type": "feedback", "call_id": call_id, "value": 2.0})
    theirs = {"type": "feedback", "trajectory_id": "theirs", "call_id": call_id, "value": -9.0}
    await other.ok({"type": "start", "trajectory_id": "theirs"}, theirs)
    await agent.ok(
        {"type": "start", "trajectory_id": "t"},
        {"type": "step", "trajectory_id": "t", "number": 0, "calls": [call_id]},
        {"type": "finish", "trajectory_id": "t"},
    )
    given = await stack.store.pool.fetch("SELECT trajectory_id, value FROM babylon.feedback")
    assert {(row["trajectory_id"], row["value"]) for row in given} == {("t", 2.0), ("theirs", -9.0)}


async def test_a_bad_event_costs_only_itself(stack: Stack, agent: Player) -> None:
    answer = await agent.send(
        {"type": "start", "trajectory_id": "t", "at": at(0)},
        {"type": "start", "trajectory_id": "t", "agent_id": "another"},
        {"type": "step", "trajectory_id": "t"},
        step("t", 0, calls=[{"messages": [{"role": "user", "content": "?"}], "response": "!"}]),
        step("t", 0, action={"action_type": "OTHER"}),
        step("t", 1, at=LAST_HOUR.end.isoformat()),
        step("t", 1, state={"agentPnL": "much"}),
        step("no", 0),
        {"type": "feedback", "trajectory_id": "t"},
        {"type": "dance"},
        step("t", 2, calls=["unknown"]),
        {"type": "finish", "trajectory_id": "t"},
        step("t", 1),
        {"type": "finish", "trajectory_id": "t"},
    )
    results = answer.json()["results"]
    assert [result["status"] for result in results] == [
        *(200, 409, 400, 200, 409, 409, 400, 404, 400, 400, 200, 409, 200, 409)
    ]
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == results[1]["error"]
    for result, told in ((2, "number: Field required"), (5, "end of window"), (6, "agentPnL"),
                         (11, "step 1 is missing"), (13, "names call 'unknown'")):  # fmt: skip
        assert told in results[result]["error"], results[result]["error"]


@pytest.mark.parametrize("trajectory", ["run/1", "/run//1/", "a b?c"])
async def test_a_trajectory_is_found_by_any_id(agent: Player, trajectory: str) -> None:
    await agent.ok({"type": "start", "trajectory_id": trajectory})
    answer = await agent.http.get(f"/v1/trajectories/{quote(trajectory, safe='')}")
    assert answer.status_code == 200 and answer.json()["trajectory_id"] == trajectory


async def test_the_largest_step_number_leaves_a_trajectory_usable(
    stack: Stack, agent: Player
) -> None:
    await agent.ok({"type": "start", "trajectory_id": "t", "at": at(0)}, step("t", 0))
    last = {**step("t", MAX_STEPS), "at": at(1)}
    assert (await agent.send(last)).status_code == 400
    await agent.ok({**last, "number": MAX_STEPS - 1})
    await stack.store.pool.execute(  # of a gateway before this limit
        "UPDATE babylon.play_steps SET number = 2147483647 WHERE number > 0"
    )
    await agent.ok({"type": "feedback", "trajectory_id": "t", "value": 1})
    answer = await agent.http.get("/v1/trajectories/t")
    assert answer.json()["next_step"] == 2**31


async def test_a_value_that_the_database_refuses_is_no_reason_to_try_again(
    agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusing(*_: object) -> None:
        raise asyncpg.NumericValueOutOfRangeError("a secret")

    monkeypatch.setattr(handler, "add_step", refusing)
    answer = await agent.send({"type": "start", "trajectory_id": "t", "at": at(0)}, step("t", 0))
    _, result = answer.json()["results"]
    assert (result["status"], result["code"]) == (400, "not_storable")
    assert "NumericValueOutOfRangeError" in result["error"] and "secret" not in answer.text


async def test_a_step_that_arrives_while_the_trajectory_is_finished_is_stored_or_refused(
    stack: Stack, agent: Player
) -> None:
    await agent.ok({"type": "start", "trajectory_id": "t"}, step("t", 0, at=None) | {"at": None})
    finish = {"type": "finish", "trajectory_id": "t"}
    late = {"type": "step", "trajectory_id": "t", "number": 1}
    answers = await asyncio.gather(*(agent.send(one) for one in (finish, late, finish, finish)))
    finished = [a.json()["results"][0] for a in (answers[0], *answers[2:])]
    assert sorted(one["repeated"] for one in finished) == [False, True, True]
    (row,) = await stack.store.pool.fetch("SELECT * FROM trajectories")
    assert row["episodeLength"] == (2 if answers[1].status_code == 200 else 1)
    assert await stack.store.pool.fetchval("SELECT count(*) FROM babylon.play_steps") == 0


async def test_a_trajectory_takes_steps_up_to_a_limit_and_is_finished_with_what_it_took(
    stack: Stack, agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_limits, "MAX_STORED_BYTES", 5000)
    large = [step("t", number, state={"seen": "x" * 1000}) for number in range(3)]
    await agent.ok({"type": "start", "trajectory_id": "t", "at": at(0)}, *large[:2])
    (refused,) = (await agent.send(large[2])).json()["results"]
    assert refused["status"] == 413 and refused["code"] == "too_large"
    assert "bytes of steps and spans, of at most 5000" in refused["error"]
    (again,) = await agent.ok(large[1])
    assert again["repeated"]
    monkeypatch.setattr(size_limits, "MAX_STORED_BYTES", 2**12)  # each counts with its row
    small = [step("small", number) for number in range(4)]
    answer = await agent.send({"type": "start", "trajectory_id": "small", "at": at(0)}, *small)
    assert [one["status"] for one in answer.json()["results"]] == [200, 200, 200, 200, 413]
    await agent.ok({"type": "finish", "trajectory_id": "t"})
    (row,) = await stack.store.pool.fetch("SELECT * FROM trajectories")
    assert row["episodeLength"] == 2


async def test_a_finish_whose_calls_are_too_large_is_refused_before_they_are_read(
    agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes memory however short it is: a program may name one trajectory for ever."""
    monkeypatch.setattr(size_limits, "MAX_CALL_BYTES", 2**11)
    for _ in range(2):
        await agent.chat("t")
    answer = await agent.send({"type": "finish", "trajectory_id": "t"})
    assert answer.status_code == 413
    assert "bytes of prompts and answers of calls, of at most 2048" in answer.text


async def test_of_two_trajectories_that_name_a_call_at_once_one_is_finished(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert_calls(store, [call(1, trajectory_id=None, agent_id=None, key_id="local")])
    send, both, read = to_store(store), asyncio.Barrier(2), handler._records

    async def at_once(*args: Any) -> Any:
        records = await read(*args)
        await both.wait()
        return records

    monkeypatch.setattr(handler, "_records", at_once)
    for name in ("t", "u"):
        begun = {"type": "start", "trajectory_id": name, "agent_id": "a"}
        step = {"type": "step", "trajectory_id": name, "number": 0, "calls": ["c1"]}
        await send([begun, step])
    finishes = ([{"type": "finish", "trajectory_id": name}] for name in ("t", "u"))
    results = [one for (one,) in await asyncio.gather(*map(send, finishes))]
    refused, finished = sorted(results, key=lambda one: one["error"] is None)
    assert (refused["status"], finished["calls"]) == (409, 1)
    assert "names a call that another trajectory has taken" in str(refused["error"])
    (row,) = await store.pool.fetch("SELECT * FROM trajectories")
    assert row["trajectoryId"] == finished["trajectory_id"]


async def test_finishes_leave_connections_to_recording_and_routes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, spans and rests of spans have places of their own; large ones take seconds."""
    slow, build = threading.Event(), handler._built

    def built(*args: Any) -> Any:
        slow.wait(60)
        return build(*args)

    monkeypatch.setattr(handler, "_built", built)
    send = to_store(store)
    names = [f"t{n}" for n in range(store.pool.get_max_size())]
    for name in names:
        begun = {"type": "start", "trajectory_id": name, "agent_id": "a"}
        await send([begun, {"type": "step", "trajectory_id": name, "number": 0}])
    finishes = [
        asyncio.create_task(send([{"type": "finish", "trajectory_id": name}])) for name in names
    ]
    await asyncio.sleep(1)
    try:
        async with asyncio.timeout(10):
            assert await store.pool.fetchval("SELECT 1") == 1
    finally:
        slow.set()
        results = await asyncio.gather(*finishes)
    assert [one["error"] for (one,) in results] == [None] * len(names)


async def test_a_trajectory_takes_feedback_up_to_a_limit(
    stack: Stack, agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_limits, "MAX_FEEDBACK_BYTES", 5000)
    told = [
        {"type": "feedback", "trajectory_id": "t", "name": f"n{n}", "comment": "x" * 1000}
        for n in range(3)
    ]
    await agent.ok({"type": "start", "trajectory_id": "t", "at": at(0)}, *told[:2])
    (refused,) = (await agent.send(told[2])).json()["results"]
    assert (refused["status"], refused["code"]) == (413, "too_large")
    assert "bytes of feedback, of at most 5000" in refused["error"]
    assert await stack.store.pool.fetchval("SELECT count(*) FROM babylon.feedback") == 2


async def test_a_finish_reads_steps_and_builds_the_row_in_threads(
    agent: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    for name in ("call_ids", "add_steps", "finished_row"):
        work = getattr(handler, name)

        def noted(*args: Any, work: Any = work) -> Any:
            threads.append(threading.current_thread())
            return work(*args)

        monkeypatch.setattr(handler, name, noted)
    call = (await agent.chat("t")).parse().id
    await agent.ok(
        {"type": "start", "trajectory_id": "t", "at": at(0)},
        step("t", 0, calls=[call, {"messages": [{"role": "user"}], "response": "!"}]),
        {"type": "finish", "trajectory_id": "t"},
    )
    assert len(threads) == 3 and threading.main_thread() not in threads


async def test_a_price_of_one_time_replaces_the_one_before(stack: Stack, agent: Player) -> None:
    for first, last in ((10, 990), (100, 110)):  # a correction of both
        await agent.ok(
            {"type": "price", "ticker": "NVDA", "price_usd": first, "at": at(1)},
            {"type": "price", "ticker": "NVDA", "price_usd": last, "at": at(50)},
            {"type": "price", "ticker": "AAPL", "price_usd": first, "at": at(1)},
        )
    await agent.ok({"type": "outcomes", "window_id": LAST_HOUR.id})
    rows = await stack.store.pool.fetch(
        'SELECT "stockTicker", "startPrice", "endPrice", sentiment FROM market_outcomes ORDER BY id'
    )
    assert [tuple(row) for row in rows] == [
        ("AAPL", 100, 100, "NEUTRAL"),
        ("NVDA", 100, 110, "BULLISH"),
    ]


async def test_outcomes_are_truth_for_all_and_not_for_a_key_of_one_agent(
    stack: Stack, agent: Player
) -> None:
    truth = [
        {"type": "price", "ticker": "NVDA", "price_usd": 100, "at": at(1)},
        {"type": "price", "ticker": "NVDA", "price_usd": 110, "at": at(50)},
        {"type": "probability", "market_id": "m1", "question": "Up?", "yes": 0.4, "at": at(1)},
        {"type": "resolution", "market_id": "m1", "question": "Up?", "outcome": "YES",
         "at": at(9)},
        {"type": "outcomes", "window_id": LAST_HOUR.id},
    ]  # fmt: skip
    await agent.ok(*truth)
    await agent.ok(*truth)
    rows = await stack.store.pool.fetch(
        'SELECT "changePercent", question, outcome FROM market_outcomes ORDER BY question'
    )
    assert [(row[0] and float(row[0]), row[1], row[2]) for row in rows] == [
        (None, "Up?", "YES"),
        (10.0, None, None),
    ]
    key = await create_key(stack.store, "bound", scopes=["record"], agents=["a"])
    async with player(stack, str(key)) as bound, asyncio.timeout(20):
        while (refused := await bound.send(truth[0])).status_code == 401:
            await asyncio.sleep(0.05)
    assert refused.json()["error"]["code"] == "wrong_agent"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"events": []}', 400),
        (b'{"events": [{}]}', 400),
        (b'{"events": ' + b"[" * 100_000, 400),
        (b'{"events": [{"type": "feedback", "a": ' + b"[" * 300 + b"]" * 300 + b"}]}", 400),
        (b'{"events": [{"type": "start", "trajectory_id": "\xff"}]}', 400),
        (b'{"events": [{"type": "start", "trajectory_id": "\\u0000"}]}', 400),
        (b'{"events": [{"type": "feedback", "trajectory_id": "t", "value": 1e999}]}', 400),
    ],
)
async def test_hostile_bodies_get_a_clear_error(agent: Player, body: bytes, status: int) -> None:
    answer = await agent.http.post("/v1/events", content=body)
    assert answer.status_code == status and answer.json()["error"]["message"]


async def test_only_a_key_is_answered_and_the_description_needs_none(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as http:
        assert (await http.post("/v1/events", json={"events": []})).status_code == 401
        assert (await http.get("/v1/trajectories/t")).status_code == 401
        described = (await http.get("/openapi.json")).json()
        assert set(described["paths"]) == {"/v1/events", "/v1/trajectories/{trajectory_id}"}
        assert (await http.put("/v1/events")).status_code == 405
        assert (await http.get("/v1/trajectories/")).status_code == 401  # the id is empty
        assert (await http.get("/v1/events/other")).status_code == 404


async def talk(one: Player, messages: list[dict[str, Any]], **more: Any) -> tuple[str, str]:
    """One call that appends its answer; returns the session and whether it was continued."""
    answer = await one.chat(messages=messages, **more)
    message = answer.parse().choices[0].message
    messages.append({"role": "assistant", "content": message.content.strip()})
    messages.append({"role": "user", "content": "go on"})
    return answer.headers["x-babylon-trajectory"], answer.headers["x-babylon-session"]


async def test_a_session_is_recognised_by_its_messages_and_can_be_finished(
    stack: Stack, agent: Player, other: Player
) -> None:
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"I am {name}"}] for name in "ab"
    ]
    first = [await talk(agent, chat, seed=1) for chat in chats]
    assert [told for _, told in first] == ["new", "new"] and first[0][0] != first[1][0]
    for stream in range(2):  # the sessions take turns
        again = [await talk(agent, chat, seed=stream) for chat in chats]
        assert again == [(name, "continued") for name, _ in first]
    theirs, told = await talk(other, list(chats[0]))  # the same words with another key
    assert told == "new"
    named = await agent.chat("t", messages=chats[0])
    assert "x-babylon-session" not in named.headers
    (finished,) = await agent.ok({"type": "finish", "trajectory_id": first[0][0], "reward": 1})
    assert finished["calls"] == 3
    for name in (first[0][0], first[1][0]):
        assert (await other.send({"type": "finish", "trajectory_id": name})).status_code == 403
        with pytest.raises(openai.PermissionDeniedError):
            await other.chat(name)
    rows = await stack.rows()
    last = next(row["call_id"] for row in rows if row["trajectory_id"] == first[0][0])
    start = {"type": "start", "trajectory_id": "again"}
    one = {**step("again", 0, calls=[last]), "at": None}
    await agent.ok(start, one)  # the finished session may be trained: its calls stay there
    twice = await agent.send({"type": "finish", "trajectory_id": "again"})
    assert (twice.status_code, twice.json()["error"]["code"]) == (409, "conflict")
    rows = [row["trajectory_id"] for row in await stack.rows()]
    assert rows.count(first[0][0]) == rows.count(first[1][0]) == 3
    assert rows.count(theirs) == rows.count("t") == 1


async def test_only_a_key_that_may_record_sends_events(stack: Stack, agent: Player) -> None:
    key = await create_key(stack.store, "calls", scopes=["infer"])
    async with player(stack, str(key)) as one, asyncio.timeout(20):
        event = {"type": "feedback", "trajectory_id": "session-7", "value": 9.0}
        while (refused := await one.send(event)).status_code == 401:
            await asyncio.sleep(0.05)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "scope")
        assert (await one.http.get("/v1/trajectories/session-7")).status_code == 403
    await agent.chat("session-7")  # an id of the caller's own, which begins as a session's
    await agent.ok(event)


async def test_equal_conversations_of_two_sessions_are_not_mixed(agent: Player) -> None:
    chats: list[list[dict[str, Any]]] = [[{"role": "user", "content": "same"}] for _ in range(2)]
    first = [await talk(agent, chat, seed=1) for chat in chats]
    assert chats[0] == chats[1] and first[0][0] != first[1][0]
    again = [await talk(agent, chat, seed=2 + n) for n, chat in enumerate(chats)]
    assert [told for _, told in again] == ["new", "new"]


async def test_another_gateway_recognises_a_session_a_moment_later(
    stack: Stack, agent: Player, settings: Settings
) -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    name, _ = await talk(agent, chat)
    engine = str(stack.engine.make_url("")).rstrip("/")
    noted = "SELECT count(*) FROM babylon.continuations"
    while not await stack.store.pool.fetchval(noted):
        await asyncio.sleep(0.02)
    async with running_gateway(stack.store, settings, engine, gateway_id="second") as url:
        await until_healthy(url)
        elsewhere = Player(url, agent.openai.api_key)
        async with elsewhere.http, elsewhere.openai:
            assert await talk(elsewhere, chat) == (name, "continued")
    off = settings.replace(serving={"recognise_sessions": False})
    async with running_gateway(stack.store, off, engine, gateway_id="third") as url:
        await until_healthy(url)
        elsewhere = Player(url, agent.openai.api_key)
        async with elsewhere.http, elsewhere.openai:
            assert "x-babylon-trajectory" not in (await elsewhere.chat(messages=chat)).headers


async def test_the_commands_of_the_page_run_as_written(stack: Stack, agent: Player) -> None:
    (block,) = [b for b in blocks_of(ROOT / "docs" / "play.md") if b.language == "bash"]
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", block.code),
        env={**os.environ, "ENDPOINT": stack.url, "KEY": agent.openai.api_key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await shell.communicate()
    assert shell.returncode == 0, output.decode()
    assert json.loads(output.splitlines()[-1])["next_step"] == 1
    given = await stack.store.pool.fetch("SELECT name, value FROM babylon.feedback ORDER BY value")
    assert [tuple(row) for row in given] == [("reward", -0.25), ("tone", 0.5), ("reward", 1.0)]


@pytest.mark.parametrize("by", ["http", "store"])
async def test_the_python_client_records_by_blocks(stack: Stack, agent: Player, by: str) -> None:
    key = agent.openai.api_key
    send_by = to_store(stack.store) if by == "store" else None
    async with AsyncPlayClient(stack.url, key, send_by=send_by) as client:
        async with client.trajectory("a", "shard") as play:
            for reward in range(2):
                answer = await agent.chat(play.trajectory_id, headers=play.headers)
                await play.step(state={"tick": reward}, reward=reward)  # joined by the header
            await play.feedback(0.5, call_id=answer.parse().id)
        with pytest.raises(PlayRefusedError, match="is finished") as refused:
            await play.step()
        assert refused.value.status == 409
        with pytest.raises(ZeroDivisionError):
            async with client.trajectory("a") as broken:
                await broken.step()
                raise ZeroDivisionError
    (row,) = await stack.store.pool.fetch("SELECT * FROM trajectories")
    assert row["trajectoryId"] == play.trajectory_id and row["totalReward"] == 1.0
    steps = json.loads(row["stepsJson"])
    assert [len(one["llmCalls"]) for one in steps] == [1, 1]


@pytest.mark.parametrize(
    "fields",
    [{"reward": math.nan}, {"state": {"x": math.inf}}, {"state": {"x": "\ud800"}}],
    ids=["reward", "state", "text"],
)
async def test_what_json_cannot_say_is_refused_and_not_stored_as_null(
    store: Store, fields: dict[str, Any]
) -> None:
    async with AsyncPlayClient(send_by=to_store(store)) as client:
        with pytest.raises(PlayRefusedError, match=r"finite|not JSON compliant|is no JSON"):
            async with client.trajectory("a") as play:
                await play.step(**fields)
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.play_steps") == 0


async def test_a_program_without_an_event_loop_records_to_a_store(settings: Settings) -> None:
    def record() -> None:
        opening = blocking_to_store(open_store(settings))
        with opening as send, PlayClient(send_by=send) as client:
            with client.trajectory("a", "shard", trajectory_id="t") as play:
                assert play.step(state={"tick": 0}, reward=0.5) == 0
            with pytest.raises(PlayRefusedError, match="is finished"):
                play.step()

    async with open_store(settings, migrate=True) as store:
        await asyncio.to_thread(record)
        (row,) = await store.pool.fetch("SELECT * FROM trajectories")
    assert (row["trajectoryId"], row["totalReward"]) == ("t", 0.5)


async def test_a_trajectory_is_finished_whose_call_was_answered_while_a_rule_came(
    store: Store,
) -> None:
    """The call has a plain id, and no record."""
    send = to_store(store)
    begun = {"type": "start", "trajectory_id": "t", "agent_id": "alice"}
    step = {"type": "step", "trajectory_id": "t", "number": 0, "calls": ["c" * 32]}
    finish = {"type": "finish", "trajectory_id": "t"}
    (_, _, refused) = await send([begun, step, finish])
    assert refused["code"] == "unknown_call"
    await set_rule(store, "agent", "alice", 0.0, [])
    (finished,) = await send([finish])
    assert (finished["error"], finished["calls"], finished["unrecorded"]) == (None, 0, 1)


async def test_rules_about_an_agent_hold_for_calls_that_name_its_trajectory_alone(
    stack: Stack, agent: Player
) -> None:
    await set_rule(stack.store, "agent", "alice", 0.0, [])
    async with asyncio.timeout(60):
        of_alice = {"x-babylon-agent": "alice"}
        while not (await agent.chat(headers=of_alice)).parse().id.startswith("unrecorded-"):
            pass  # until the gateway knows the rule
    await agent.ok({"type": "start", "trajectory_id": "t", "agent_id": "alice"})
    call_id = (await agent.chat("t")).parse().id
    assert call_id.startswith("unrecorded-")
    (_, finished) = await agent.ok(
        {"type": "step", "trajectory_id": "t", "number": 0, "calls": [call_id]},
        {"type": "finish", "trajectory_id": "t"},
    )
    assert (finished["calls"], finished["unrecorded"]) == (0, 1)
    (row,) = await stack.store.pool.fetch("SELECT * FROM trajectories")
    assert "hello" not in row["stepsJson"]


async def test_a_step_may_name_calls_that_sampling_left_out(
    stack: Stack, agent: Player, settings: Settings
) -> None:
    await set_rule(stack.store, "agent", "sampled", 0.5, [])
    headers = {"x-babylon-agent": "sampled"}
    async with asyncio.timeout(60):
        while not (await agent.chat(headers=headers)).parse().id.startswith("unrecorded-"):
            pass  # until the gateway knows the rule
    told: dict[bool, list[str]] = {True: [], False: []}
    async with AsyncPlayClient(stack.url, agent.openai.api_key) as client, asyncio.timeout(60):
        async with client.trajectory("sampled", "shard", at=at(0)) as sampled:
            # Each call is sampled by itself, because it names no trajectory and begins a session.
            while min(map(len, told.values())) < 2 or sampled.next_step < 5:
                # With these seeds no reply is empty.
                answer = await agent.chat(headers=headers, seed=sampled.next_step % 5)
                call_id = answer.parse().id
                assert answer.headers["x-call-id"] == call_id
                told[call_id.startswith("unrecorded-")].append(call_id)
                await sampled.step(calls=[call_id], at=at(sampled.next_step + 1))
            (result,) = await client.send(
                {"type": "finish", "trajectory_id": sampled.trajectory_id}
            )
            sampled.finished = True
        assert (result["calls"], result["unrecorded"]) == (len(told[False]), len(told[True]))
        await agent.ok(*await play(agent, "another"))  # a window has at least two agents
        about = {"type": "feedback", "call_id": told[True][0], "value": 1.0}
        with pytest.raises(PlayRefusedError, match="send trajectory_id"):
            await client.send(about)
        await client.send({**about, "trajectory_id": sampled.trajectory_id})
        unknown = {"type": "step", "trajectory_id": "t", "number": 0, "calls": ["made up"]}
        finish = {"type": "finish", "trajectory_id": "t"}
        with pytest.raises(PlayRefusedError, match="is not recorded for this key"):
            await client.send({"type": "start", "trajectory_id": "t"}, unknown, finish)
    recorded = {row["call_id"] for row in await stack.rows()}
    assert recorded >= {*told[False]} and not any("unrecorded" in one for one in recorded)
    few = settings.replace(windows={"min_agents": 2})
    _, artifact = await validated(stack.store, few, LAST_HOUR)
    found = {one.trajectory_id: one.calls for one in read_trajectories(settings.home, artifact)}
    calls = found[sampled.trajectory_id]
    assert len(calls) == len(told[False]) and not any(call.retokenized for call in calls)


async def test_the_blocking_client_sends_again_what_was_not_answered(
    stack: Stack, agent: Player
) -> None:
    def record() -> str:
        with PlayClient(stack.url, agent.openai.api_key) as client:
            post, client._http.post = client._http.post, lose_one  # type: ignore[method-assign]
            lost.append(post)
            with client.trajectory("a", at=at(0)) as play:
                play.step(at=at(1), reward=1.0)
        return play.trajectory_id

    lost: list[Any] = []

    def lose_one(*args: Any, **options: Any) -> httpx.Response:
        answer: httpx.Response = lost[0](*args, **options)
        if len(lost) == 1:
            lost.append(answer)
            raise httpx.ReadTimeout("lost")
        return answer

    name = await asyncio.to_thread(record)
    assert await stack.store.pool.fetchval('SELECT "trajectoryId" FROM trajectories') == name


async def test_calls_of_another_agent_are_left_out_also_if_the_first_call_names_none(
    stack: Stack, agent: Player
) -> None:
    await agent.chat("t")
    await agent.chat("t", user="bob")
    await agent.chat("t", user="eve")
    (finished,) = await agent.ok({"type": "finish", "trajectory_id": "t"})
    assert finished["calls"] == 2
    (row,) = await stack.store.pool.fetch("SELECT * FROM trajectories")
    assert (row["agentId"], row["episodeLength"]) == ("bob", 2)


async def test_a_step_that_names_a_call_of_another_agent_is_refused_with_the_reason(
    agent: Player,
) -> None:
    await agent.ok({"type": "start", "trajectory_id": "t", "agent_id": "seven"})
    users = (await agent.chat("t", user="bob")).parse().id
    await agent.ok({"type": "step", "trajectory_id": "t", "number": 0, "calls": [users]})
    answer = await agent.send({"type": "finish", "trajectory_id": "t"})
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert "is of agent 'seven' and names a call of agent 'bob': send 'seven' in x-baby" in message

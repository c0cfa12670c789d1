"""Responses and Messages through gateway and engine, as the official SDKs of both speak them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import asyncpg
import openai
import pytest
import torch
from anthropic import AsyncAnthropic

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.policies.load import load_policy
from babylon.store import Store
from benchmarks.gateway.upstream import Upstream, events
from tests.calling_policy import CALL, save_calling_policy
from tests.integration.canned_gateway import canned_gateway
from tests.integration.test_serving import Stack, register, running_stack, until_healthy
from tests.tiny_policy import plain_logprobs

SCHEMA = {"type": "object", "properties": {"ticker": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "price", "parameters": SCHEMA, "strict": False}
STRICT = FUNCTION | {"strict": True}
TOOL = {"name": "price", "input_schema": SCHEMA}
PARTS = ("prompt", "completion")
TURNS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_calling_policy(tmp_path_factory.mktemp("policy") / "v0")


@pytest.fixture
async def stack(store: Store, settings: Settings, checkpoint: Path) -> AsyncIterator[Stack]:
    await register(store, [checkpoint])
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        yield stack


@pytest.fixture
async def claude(stack: Stack, settings: Settings) -> AsyncIterator[AsyncAnthropic]:
    key = str(local_key(settings.home.root))
    async with AsyncAnthropic(base_url=stack.url, api_key=key, max_retries=0) as client:
        yield client


async def ask_responses(stack: Stack, stream: bool, **asked: Any) -> Any:
    asked = {"model": "babylon", "tools": [FUNCTION], "max_output_tokens": 64, **asked}
    if not stream:
        return await stack.client.responses.create(**asked)
    async with stack.client.responses.stream(**asked) as answer:
        kinds = [event.type async for event in answer]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
        return await answer.get_final_response()


async def play_responses(stack: Stack, stream: bool) -> list[Any]:
    """Answer each call of the tool, and return the responses."""
    items: list[Any] = [{"role": "user", "content": "Trade."}]
    answers = []
    for turn in range(TURNS):
        answer = await ask_responses(
            *(stack, stream), instructions="You trade.", input=items, user="agent-7"
        )
        answers.append(answer)
        # as the agents' SDKs do: the output items are the input of the next turn
        items += [item.model_dump(exclude_unset=True, exclude={"parsed_arguments"})
                  for item in answer.output]  # fmt: skip
        for item in answer.output:
            if item.type == "function_call":
                assert json.loads(item.arguments) == {"ticker": "NVDA"}
                output = f"costs {turn}.5"
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": output}
                )
        items.append({"role": "user", "content": "Go on."})
    return answers


async def ask_claude(claude: AsyncAnthropic, stream: bool, **asked: Any) -> Any:
    asked = {"model": "babylon", "tools": [TOOL], "max_tokens": 64, **asked}
    if not stream:
        return await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as answer:
        return await answer.get_final_message()


async def play_claude(claude: AsyncAnthropic, stream: bool) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "Trade."}]
    answers = []
    for turn in range(TURNS):
        answer = await ask_claude(
            *(claude, stream),
            system=[{"type": "text", "text": "You trade."}],
            messages=messages,
            metadata={"user_id": "agent-7"},
        )
        answers.append(answer)
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                assert block.input == {"ticker": "NVDA"}
                results.append(
                    {"type": "tool_result", "tool_use_id": block.id, "content": f"costs {turn}.5"}
                )
        said = [block.model_dump(exclude_unset=True, exclude={"parsed_output"})
                for block in answer.content]  # fmt: skip
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
        ]
    return answers


def assert_exact(rows: list[asyncpg.Record], checkpoint: Path) -> None:
    """Every row is trainable, its logprobs are the policy's, its prompt is the conversation."""
    model, tokenizer = load_policy(checkpoint, frozen=True)
    assert {row["untrainable_reason"] for row in rows} == {None}
    assert len({row["call_id"] for row in rows}) == len(rows)
    for turn, row in enumerate(rows):
        exact = plain_logprobs(model, row["prompt_token_ids"], row["completion_token_ids"])
        recorded = torch.tensor(row["logprobs"], dtype=torch.float64)
        torch.testing.assert_close(recorded, exact, atol=1e-4, rtol=0)
        assert row["agent_id"] == "agent-7"
        messages = json.loads(row["messages"])
        assert [one["role"] for one in messages].count("user") == turn + 1
        assert messages[0] == {"role": "system", "content": "You trade."}
        prompt = tokenizer.decode(row["prompt_token_ids"])
        assert prompt.count("Go on.") == turn and '"name": "price"' in prompt
        if turn:  # the next prompt holds what was sampled; a chat message puts text before calls
            before, sampled = (rows[turn - 1][f"{part}_token_ids"] for part in PARTS)
            replayed = row["prompt_token_ids"][len(before) :][: len(sampled)]
            assert row["prompt_token_ids"][: len(before)] == before
            assert sorted(replayed) == sorted(sampled)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools_are_recorded_as_they_were_sampled(
    stack: Stack, checkpoint: Path, stream: bool
) -> None:
    answers = await play_responses(stack, stream)
    rows = await stack.rows()
    assert [row["call_id"] for row in rows] == [answer.id for answer in answers]
    assert_exact(rows, checkpoint)
    called = 0
    for answer, row in zip(answers, rows, strict=True):
        calls = [item for item in answer.output if item.type == "function_call"]
        assert (answer.status, answer.model) == ("completed", "babylon-v0")
        assert answer.output_text == row["response"]
        assert answer.usage.output_tokens == len(row["completion_token_ids"])
        assert answer.usage.input_tokens == len(row["prompt_token_ids"])
        stored = json.loads(row["answer"])["tool_calls"] if row["answer"] else []
        assert [one["id"] for one in stored] == [call.call_id for call in calls]
        called += len(calls)
    assert called


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_with_tools_are_recorded_as_they_were_sampled(
    stack: Stack, claude: AsyncAnthropic, checkpoint: Path, stream: bool
) -> None:
    answers = await play_claude(claude, stream)
    rows = await stack.rows()
    assert [row["call_id"] for row in rows] == [answer.id for answer in answers]
    assert_exact(rows, checkpoint)
    reasons = {answer.stop_reason for answer in answers}
    assert "tool_use" in reasons and reasons <= {"tool_use", "end_turn", "max_tokens"}
    for answer, row in zip(answers, rows, strict=True):
        uses = [block for block in answer.content if block.type == "tool_use"]
        texts = [block.text for block in answer.content if block.type == "text"]
        assert "".join(texts) == row["response"]
        assert answer.usage.output_tokens == len(row["completion_token_ids"])
        assert answer.usage.input_tokens == len(row["prompt_token_ids"])
        stored = json.loads(row["answer"])["tool_calls"] if row["answer"] else []
        assert [one["id"] for one in stored] == [use.id for use in uses]
        assert bool(uses) == (CALL in load_policy(checkpoint, frozen=True)[1].decode(
            row["completion_token_ids"]))  # fmt: skip


async def test_refusals_have_each_dialects_shape(stack: Stack, claude: AsyncAnthropic) -> None:
    hello: list[Any] = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="send the conversation so far in input"):
        await ask_responses(stack, False, input="hello", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="gateways run no tools of OpenAI"):
        await ask_responses(stack, False, input="hello", tools=[{"type": "web_search"}])
    with pytest.raises(anthropic.BadRequestError) as refused:
        await ask_claude(claude, False, messages=[*hello, {"role": "assistant", "content": "I"}])
    assert refused.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "the last message is the assistant's (prefill): end with a message of the"
            " user",
        },
    }
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await ask_claude(claude, True, messages=hello, model="claude")
    with pytest.raises(anthropic.AuthenticationError, match="no valid API key"):
        await ask_claude(claude.copy(api_key="wrong"), False, messages=hello)
    with pytest.raises(openai.AuthenticationError):
        await stack.client.copy(api_key="wrong").responses.create(model="babylon", input="hello")
    assert await stack.rows() == []


async def test_tokens_are_counted_as_the_engine_reads_them(
    stack: Stack, claude: AsyncAnthropic
) -> None:
    called = {"id": "c1", "type": "tool_use", "name": "price", "input": {"ticker": "NVDA"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "costs 5"}
    asked: dict[str, Any] = {
        "model": "babylon",
        "system": "You trade.",
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "Trade."},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, called]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ],
    }
    plain = {"model": "babylon", "messages": asked["messages"][:1]}
    for one in (asked, {**asked, "tool_choice": {"type": "none"}}, plain):
        answer = await claude.messages.create(**one, max_tokens=1)
        assert (await claude.messages.count_tokens(**one)).input_tokens == answer.usage.input_tokens
    spoken = {"instructions": "You trade.", "input": "Trade.", "tools": [STRICT]}
    answered = await ask_responses(stack, False, max_output_tokens=1, **spoken)
    counted = await stack.client.responses.input_tokens.count(model="babylon", **spoken)
    assert counted.input_tokens == answered.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
        await claude.messages.count_tokens(model="babylon", messages=[])
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await claude.messages.count_tokens(**{**plain, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        await claude.copy(api_key="wrong").messages.count_tokens(**plain)
    assert len(await stack.rows()) == 4  # a count is no call


async def test_a_strict_tool_does_not_constrain_the_engine_unless_it_is_forced(
    stack: Stack,
) -> None:
    loose = {name: value for name, value in STRICT.items() if name != "strict"}
    for choice in ("auto", "none"):
        counts = {
            (
                await ask_responses(stack, False, input="hi", tools=[tool], tool_choice=choice)
            ).usage.input_tokens
            for tool in (STRICT, loose)
        }
        assert len(counts) == 1
    assert {row["untrainable_reason"] for row in await stack.rows()} == {None}


async def test_both_sdks_list_the_models(stack: Stack, claude: AsyncAnthropic) -> None:
    ids = ["babylon", "babylon-v0"]
    assert [one.id async for one in stack.client.models.list()] == ids
    page = await claude.models.list()
    assert [(one.id, one.display_name, one.type) for one in page.data] == [
        (name, name, "model") for name in ids
    ]
    assert (page.has_more, page.first_id, page.last_id) == (False, *ids)
    one = await claude.models.retrieve("babylon")
    assert one.created_at.year == 1970 and (await stack.client.models.retrieve(ids[1])).id == ids[1]
    with pytest.raises(anthropic.NotFoundError, match="see /v1/models"):
        await claude.models.retrieve("claude")


async def test_what_gateways_do_not_keep_is_refused_with_the_remedy(
    stack: Stack, claude: AsyncAnthropic
) -> None:
    absent = [
        stack.client.responses.retrieve("resp_1"),
        stack.client.responses.input_items.list("resp_1"),
        stack.client.conversations.create(),
        stack.client.chat.completions.retrieve("c1"),
    ]
    for asked in absent:
        with pytest.raises(openai.NotFoundError, match="gateways keep no answers"):
            await asked
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        await stack.client.embeddings.create(model="babylon", input="hello")
    with pytest.raises(anthropic.NotFoundError, match="send each request to /v1/messages"):
        await claude.messages.batches.list()


class _BrokenUpstream(Upstream):
    """Ends a stream in the middle, after it sent some tokens."""

    async def _answer(self, body: bytes, send: Any) -> None:
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-type", b"text/event-stream")]})
        for event in events(exact=True)[:4]:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _MisshapenUpstream(Upstream):
    """Answers with reasoning and usage of another form than OpenAI's."""

    async def _answer(self, body: bytes, send: Any) -> None:
        stream = b'"stream":true' in body
        kind = b"text/event-stream" if stream else b"application/json"
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-type", kind)]})
        said = {"content": "hi", "reasoning": {"text": "hm"}}
        choice = {"index": 0, "delta" if stream else "message": said, "token_ids": [7]}
        if not stream:
            choice["finish_reason"] = "stop"
        whole = json.dumps({"id": "x", "choices": [choice], "usage": {"prompt_tokens": None}})
        data = f"data: {whole}\n\n" if stream else whole
        await send({"type": "http.response.body", "body": data.encode(), "more_body": False})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_misshapen_answer_raises_in_both_sdks(
    store: Store, settings: Settings, stream: bool
) -> None:
    async with canned_gateway(store, settings, _MisshapenUpstream()) as gateway:
        async with gateway.client() as client:
            with pytest.raises(openai.APIError, match="another form"):
                answer: Any = await client.responses.create(
                    model="babylon", input="hello", stream=stream
                )
                _ = [one async for one in answer]
        async with AsyncAnthropic(
            base_url=gateway.url, api_key=gateway.key, max_retries=0
        ) as claude:
            with pytest.raises(anthropic.APIStatusError, match="another form"):
                answer = await claude.messages.create(
                    model="babylon",
                    max_tokens=9,
                    messages=[{"role": "user", "content": "hello"}],
                    stream=stream,
                )
                _ = [one async for one in answer]


async def test_a_stream_that_breaks_raises_in_both_sdks(store: Store, settings: Settings) -> None:
    async with canned_gateway(store, settings, _BrokenUpstream()) as gateway:
        async with gateway.client() as client:
            with pytest.raises(openai.APIError, match="broke off"):
                async for _ in await client.responses.create(
                    model="babylon", input="hello", stream=True
                ):
                    pass
        await until_healthy(gateway.url)
        async with AsyncAnthropic(
            base_url=gateway.url, api_key=gateway.key, max_retries=0
        ) as claude:
            with pytest.raises(anthropic.APIStatusError, match="broke off"):
                async for _ in await claude.messages.create(
                    model="babylon",
                    max_tokens=9,
                    messages=[{"role": "user", "content": "hello"}],
                    stream=True,
                ):
                    pass
        assert [row["finish_reason"] for row in await gateway.rows()] == ["interrupted"] * 2

"""Completions of the embedded engine behind the real gateway, as clients and records see them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from openai import NotFoundError

from babylon.core.settings import Settings
from babylon.store import Store
from tests.integration.test_serving import Stack, register, running_stack, until_healthy
from tests.tiny_policy import plain_logprobs, save_tiny_policy, tiny_model, tiny_tokenizer

PROMPT = "The capital is"
IDS = tiny_tokenizer().encode(PROMPT)


@pytest.fixture
async def stack(store: Store, settings: Settings, tmp_path: Path) -> AsyncIterator[Stack]:
    await register(store, [save_tiny_policy(tmp_path / "v0", seed=0)])
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        yield stack


async def test_completions_whole_and_streamed_are_recorded_exactly(stack: Stack) -> None:
    create = stack.client.completions.create
    asked = {"model": "babylon", "max_tokens": 10, "seed": 3, "temperature": 0.8}
    whole = await create(prompt=PROMPT, **asked)
    stream = await create(prompt=IDS, stream=True, **asked)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text
    assert whole.choices[0].logprobs is None
    rows = await stack.rows()
    for row in rows:
        assert (row["trainable"], row["prompt_token_ids"]) == (True, IDS)
        assert row["response"] == text.replace("\0", "\ufffd")
        expected = plain_logprobs(tiny_model(0), IDS, row["completion_token_ids"], temperature=0.8)
        recorded = torch.tensor(row["logprobs"], dtype=torch.float64)
        torch.testing.assert_close(recorded, expected, atol=1e-4, rtol=0)
    assert [json.loads(row["messages"]) for row in rows] == [{"prompt": PROMPT}, {"prompt": IDS}]
    assert rows[0]["completion_token_ids"] == rows[1]["completion_token_ids"]


async def test_who_asks_for_logprobs_sees_those_of_the_drawn_tokens(stack: Stack) -> None:
    answer = await stack.client.completions.create(
        model="babylon", prompt=PROMPT, max_tokens=5, logprobs=0
    )
    (row,) = await stack.rows()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == row["logprobs"]


async def test_of_several_choices_the_first_is_recorded_and_none_is_trainable(stack: Stack) -> None:
    chat, completions = stack.client.chat.completions, stack.client.completions
    asked = {"model": "babylon", "max_tokens": 10, "seed": 3}
    messages = [{"role": "user", "content": "hello"}]
    alone = await chat.create(messages=messages, **asked)  # type: ignore[call-overload]
    whole = await chat.create(messages=messages, n=3, **asked)  # type: ignore[call-overload]
    texts = [choice.message.content for choice in whole.choices]
    stream = await chat.create(messages=messages, n=3, stream=True, **asked)  # type: ignore[call-overload]
    streamed = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts and len({*texts}) == 3
    assert texts[0] == alone.choices[0].message.content
    batch = await completions.create(prompt=[PROMPT, "One"], **asked)  # type: ignore[call-overload]
    assert len(batch.choices) == 2
    first, *several = await stack.rows()
    assert (first["trainable"], first["response"]) == (True, texts[0].replace("\0", "\ufffd"))
    for row, count in zip(several, (3, 3, 2), strict=True):
        assert row["trainable"] is False
        assert f"one of {count} choices" in row["untrainable_reason"]
    for row in several[:2]:
        assert row["completion_token_ids"] == first["completion_token_ids"]
        assert row["prompt_token_ids"] == first["prompt_token_ids"]
    assert several[2]["prompt_token_ids"] == IDS
    assert len(several[2]["completion_token_ids"]) == len(several[2]["logprobs"]) <= 10


async def test_a_model_is_looked_up_by_its_name(stack: Stack) -> None:
    listed = [model.id async for model in stack.client.models.list()]
    assert (await stack.client.models.retrieve(listed[0])).id == listed[0]
    with pytest.raises(NotFoundError, match="'nobody'"):
        await stack.client.models.retrieve("nobody")


async def test_the_likeliest_tokens_come_through_and_leave_the_call_trainable(stack: Stack) -> None:
    answer = await stack.chat(logprobs=True, top_logprobs=3)
    content = answer.parse().choices[0].logprobs.content
    assert {len(token.top_logprobs) for token in content} == {3}
    (row,) = await stack.rows()
    assert row["trainable"] and row["logprobs"] == [token.logprob for token in content]

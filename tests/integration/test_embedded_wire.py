"""Completions of the embedded engine behind the real gateway, as clients and records see them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

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

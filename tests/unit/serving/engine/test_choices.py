"""Several choices of one request, the likeliest tokens, batched prompts, one model's card."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.lib.streaming.chat import ChatCompletionStreamState

from babylon.serving.engine.loaded_policies import load
from tests.tiny_policy import plain_logprobs, save_tiny_policy, tiny_model, tiny_tokenizer
from tests.unit.serving.engine.test_constrained_answers import HELLO, engine_of

IDS = {"extra_body": {"return_token_ids": True}}
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.fixture
async def client(path: Path) -> AsyncIterator[AsyncOpenAI]:
    async with engine_of(path) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "p", "messages": HELLO, "max_tokens": 12, "seed": 4, **fields}


async def test_each_choice_is_a_draw_of_its_own(client: AsyncOpenAI) -> None:
    alone = [
        (await client.chat.completions.create(**chat(seed=seed, **IDS))).choices[0]
        for seed in (4, 5, 6)
    ]
    together = await client.chat.completions.create(**chat(n=3, logprobs=True, **IDS))
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    for one, other in zip(alone, together.choices, strict=True):
        assert one.message == other.message and one.token_ids == other.token_ids  # type: ignore[attr-defined]
        exact = plain_logprobs(tiny_model(1), together.prompt_token_ids, other.token_ids)  # type: ignore[attr-defined]
        scores = [token.logprob for token in other.logprobs.content]  # type: ignore[union-attr]
        assert scores == pytest.approx(exact.tolist(), abs=1e-4)
    usage = together.usage
    assert usage and (usage.prompt_tokens, usage.completion_tokens) == (
        len(together.prompt_token_ids),  # type: ignore[attr-defined]
        sum(len(choice.token_ids) for choice in together.choices),  # type: ignore[attr-defined]
    )
    unseeded = await client.chat.completions.create(**chat(n=3, seed=None))
    assert len({choice.message.content for choice in unseeded.choices}) == 3


async def test_streamed_choices_add_up_to_the_whole(client: AsyncOpenAI) -> None:
    asked = chat(n=3, max_tokens=40, stop=["e"], logprobs=True)
    whole = await client.chat.completions.create(**asked)
    events = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    state = ChatCompletionStreamState()
    async for chunk in events:
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot
    assert streamed.usage == whole.usage
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert (one.message.content, one.finish_reason) == (
            other.message.content,
            other.finish_reason,
        )
        assert one.logprobs and other.logprobs
        assert [token.token for token in one.logprobs.content or ()] == [
            token.token for token in other.logprobs.content or ()
        ]


async def test_the_likeliest_tokens_are_those_of_a_plain_forward_pass(client: AsyncOpenAI) -> None:
    asked = chat(logprobs=True, top_logprobs=5, temperature=0.7, **IDS)
    answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    ids, prompt = choice.token_ids, answer.prompt_token_ids  # type: ignore[attr-defined]
    with torch.inference_mode():
        logits = tiny_model(1)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    found = torch.log_softmax(logits / 0.7, -1).topk(5)
    content = choice.logprobs.content  # type: ignore[union-attr]
    assert content and len(content) == len(ids)
    for place, values, indices in zip(content, found.values, found.indices, strict=True):
        texts = [TOKENIZER.decode([i]) for i in indices.tolist()]
        assert [top.token for top in place.top_logprobs] == texts
        scores = [top.logprob for top in place.top_logprobs]
        assert scores == pytest.approx(values.tolist(), abs=1e-4)
    plain = await client.chat.completions.create(**chat(temperature=0.7, **IDS))
    assert plain.choices[0].token_ids == ids  # type: ignore[attr-defined]


async def test_prompts_in_a_batch_get_the_answers_of_single_ones(client: AsyncOpenAI) -> None:
    prompts = ["one", "two or three"]
    asked: dict[str, Any] = {"model": "p", "max_tokens": 9, "seed": 3, "logprobs": 2, **IDS}
    alone = [(await client.completions.create(prompt=one, **asked)).choices[0] for one in prompts]
    for prompt in prompts, [TOKENIZER.encode(one) for one in prompts]:
        batch = await client.completions.create(prompt=prompt, n=2, **asked)
        assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
        for one, other in zip(alone, batch.choices[::2], strict=True):
            for name in ("text", "token_ids", "prompt_token_ids", "finish_reason"):
                assert getattr(one, name) == getattr(other, name)
            assert other.logprobs and one.logprobs
            assert other.logprobs.token_logprobs == pytest.approx(
                one.logprobs.token_logprobs, abs=1e-4
            )
        assert batch.choices[0].text != batch.choices[1].text
        assert batch.usage and batch.usage.prompt_tokens == sum(map(len, prompts))
    stream = await client.completions.create(prompt=prompts, n=2, stream=True, **asked)
    texts = ["", "", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in batch.choices]
    sizes = {len(place) for place in alone[0].logprobs.top_logprobs}  # type: ignore[union-attr]
    assert max(sizes) == 3  # the drawn one, and the two likeliest; parts of characters look alike


def test_the_bytes_of_tokens_join_to_characters(path: Path) -> None:
    policy = load("p", str(path), 0)
    ids = TOKENIZER.encode("aé€\ufffd", add_special_tokens=False)
    assert len(ids) > 4  # some are parts of characters
    assert b"".join(map(policy.token_bytes, ids)).decode() == "aé€\ufffd"


async def test_a_models_card_is_found_by_its_name(client: AsyncOpenAI) -> None:
    assert (await client.models.retrieve("p")).id == "p"
    with pytest.raises(NotFoundError, match="'q' is not loaded"):
        await client.models.retrieve("q")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n"),
        ({"n": 33}, "33 answers: ask for at most 32"),
        ({"top_logprobs": 3}, "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_too_many_are_refused(
    client: AsyncOpenAI, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequestError, match=message):
        await client.chat.completions.create(**chat(**fields))

"""``POST /v1/completions`` in vLLM's wire fields."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from transformers import AutoTokenizer

from babylon.serving.engine.engine_process import make_app
from tests.tiny_policy import plain_logprobs, save_tiny_policy, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPT = "The capital is"


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.fixture
async def engine(policy_path: Path) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(make_app())) as client:
        await client.put("/policies/p", json={"path": str(policy_path), "version": 1})
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "p", "prompt": PROMPT, "max_tokens": 12, "seed": 5, **fields}


async def post(engine: TestClient[Any, Any], **fields: Any) -> dict[str, Any]:
    response = await engine.post("/v1/completions", json=asked(**fields))
    assert response.status == 200, await response.text()
    answer: dict[str, Any] = await response.json()
    return answer


async def test_a_text_goes_on_with_tokens_logprobs_and_usage(engine: TestClient[Any, Any]) -> None:
    answer = await post(engine, logprobs=0, return_token_ids=True)
    (choice,) = answer["choices"]
    ids, prompt = choice["token_ids"], TOKENIZER.encode(PROMPT)
    assert (answer["object"], answer["model"]) == ("text_completion", "p")
    assert choice["prompt_token_ids"] == prompt
    assert choice["text"] == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
        "total_tokens": len(prompt) + 12,
    }
    logprobs = choice["logprobs"]
    expected = plain_logprobs(tiny_model(1), prompt, ids)
    torch.testing.assert_close(
        torch.tensor(logprobs["token_logprobs"], dtype=torch.float64), expected, atol=1e-4, rtol=0
    )
    assert logprobs["tokens"] == [TOKENIZER.decode([token]) for token in ids]
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert logprobs["top_logprobs"][0] == {logprobs["tokens"][0]: logprobs["token_logprobs"][0]}


async def test_token_prompts_continue_like_their_text(
    engine: TestClient[Any, Any],
) -> None:
    by_text = await post(engine)
    by_tokens = await post(engine, prompt=TOKENIZER.encode(PROMPT))
    assert by_text["choices"] == by_tokens["choices"]
    assert by_text["choices"][0].keys() == {"index", "text", "finish_reason"} | {"logprobs"}
    assert by_text["choices"][0]["logprobs"] is None


async def test_without_a_limit_sixteen_tokens_come(engine: TestClient[Any, Any]) -> None:
    answer = await post(engine, max_tokens=None, seed=1)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stream_adds_up_to_the_whole(engine: TestClient[Any, Any]) -> None:
    fields = {"logprobs": 0, "return_token_ids": True}
    whole = await post(engine, **fields)
    response = await engine.post(
        "/v1/completions", json=asked(stream=True, stream_options={"include_usage": True}, **fields)
    )
    lines = [line[6:] for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *chunks, last = map(json.loads, lines)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    (expected,) = whole["choices"]
    assert "".join(c["text"] for c in choices) == expected["text"]
    assert [i for c in choices for i in c["token_ids"]] == expected["token_ids"]
    for name in ("tokens", "text_offset"):
        assert [t for c in choices for t in c["logprobs"][name]] == expected["logprobs"][name]
    assert [c.get("prompt_token_ids") for c in choices] == [
        expected["prompt_token_ids"],
        *[None] * (len(choices) - 1),
    ]
    assert [c["finish_reason"] for c in choices][-1] == expected["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"prompt": ""}, 400, "no tokens"),
        ({"prompt": []}, 400, "$.prompt"),
        ({"prompt": ["a", [1]]}, 400, "prompt mixes kinds"),
        ({"prompt": ["a", 1]}, 400, "prompt mixes kinds"),
        ({"prompt": [1, "a"]}, 400, "prompt mixes kinds"),
        ({"prompt": ["a", ""]}, 400, "no tokens"),
        ({"prompt": ["a"] * 17, "n": 2}, 400, "34 answers"),
        ({"prompt": [1, 259]}, 400, "token 259 is outside the vocabulary of 'p' (259 tokens)"),
        ({"prompt": [1, -1]}, 400, "$.prompt"),
        ({"prompt": [1] * 510}, 400, "send less"),
        ({"logprobs": 21}, 400, "$.logprobs"),
        ({"echo": True}, 400, "echo"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"add_special_tokens": False}, 400, "add_special_tokens"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"model": "q"}, 404, "'q' is not loaded"),
    ],
)
async def test_a_bad_request_is_refused_in_openai_shape(
    engine: TestClient[Any, Any], fields: dict[str, Any], status: int, message: str
) -> None:
    response = await engine.post("/v1/completions", json=asked(**fields))
    error = (await response.json())["error"]
    assert response.status == status
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_text_whose_token_the_model_lacks_is_refused_alone(tmp_path: Path) -> None:
    """A tokenizer may have more words than the embedding has rows."""
    path = save_tiny_policy(tmp_path / "policy", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(path)
    async with TestClient(TestServer(make_app())) as client:
        await client.put("/policies/p", json={"path": str(path), "version": 1})
        fields = {"model": "p", "max_tokens": 200}
        good = asyncio.create_task(
            client.post("/v1/completions", json=fields | {"prompt": "An innocent text"})
        )
        message = {"role": "user", "content": "an <image> in a message"}
        for path_, given in (
            ("/v1/chat/completions", {"messages": [message]}),
            ("/v1/completions", {"prompt": "an <image>"}),
        ):
            bad = await client.post(path_, json=fields | given)
            assert bad.status == 400
            assert "outside the vocabulary" in (await bad.json())["error"]["message"]
        assert (await good).status == 200

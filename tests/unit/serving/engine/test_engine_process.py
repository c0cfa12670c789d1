import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from transformers import BloomConfig, BloomForCausalLM

from babylon.core.errors import ModelError
from babylon.serving.engine.engine_process import POLICIES, SCHEDULER, make_app
from babylon.serving.engine.loaded_policies import LoadedPolicy, load
from babylon.serving.engine.scheduler import Job, Scheduler
from babylon.serving.engine_protocol import SECRET
from tests.calling_policy import save_calling_policy
from tests.tiny_policy import save_tiny_policy, tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.fixture
async def engine(policy_path: Path) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(make_app())) as client:
        response = await client.put("/policies/p-v1", json={"path": str(policy_path), "version": 1})
        assert response.status == 200, await response.text()
        yield client


@pytest.fixture
async def calling_engine(tmp_path: Path) -> AsyncIterator[TestClient[Any, Any]]:
    path = save_calling_policy(tmp_path / "policy")
    async with TestClient(TestServer(make_app())) as client:
        await client.put("/policies/p-v1", json={"path": str(path), "version": 1})
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "p-v1", "messages": HELLO, "max_tokens": 20, "seed": 5, **fields}


async def post(engine: TestClient[Any, Any], **fields: Any) -> dict[str, Any]:
    response = await engine.post("/v1/chat/completions", json=chat(**fields))
    assert response.status == 200, await response.text()
    answer: dict[str, Any] = await response.json()
    return answer


async def events(engine: TestClient[Any, Any], **fields: Any) -> list[dict[str, Any]]:
    response = await engine.post("/v1/chat/completions", json=chat(stream=True, **fields))
    assert response.content_type == "text/event-stream"
    lines = [line[6:] for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def scheduler_of(engine: TestClient[Any, Any]) -> Scheduler:
    assert engine.app is not None
    return engine.app[SCHEDULER]


@asynccontextmanager
async def long_answer(engine: TestClient[Any, Any]) -> AsyncIterator[Job]:
    """A streamed answer whose sampling has begun; its client leaves after the block."""
    no_end_of_sequence = 106  # with this seed
    response = await engine.post(
        "/v1/chat/completions", json=chat(stream=True, max_tokens=480, seed=no_end_of_sequence)
    )
    for _ in ("the role", "the first token"):
        await response.content.readuntil(b"\n\n")
    (job,) = scheduler_of(engine)._running
    yield job
    response.close()


def test_a_model_without_a_bound_is_refused(tmp_path: Path) -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=259, hidden_size=16, n_layer=1, n_head=1))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no max_position_embeddings.* ENGINE=vllm"):
        load("p", str(tmp_path), 0)


@pytest.mark.parametrize("cleans_up", [False, True])
def test_tokens_are_decoded_as_the_tokenizer_does(policy_path: Path, cleans_up: bool) -> None:
    policy = load("p", str(policy_path), 0)
    policy.tokenizer.clean_up_tokenization_spaces = cleans_up
    ids = [*policy.prompt(HELLO), *range(0, 256, 5)]
    assert policy.decode(ids) == policy.tokenizer.decode(ids, skip_special_tokens=True)


async def test_only_the_secret_loads_unloads_and_calls(policy_path: Path) -> None:
    app = make_app()
    app[SECRET] = "right"
    body = {"path": str(policy_path), "version": 1}
    async with TestClient(TestServer(app)) as client:
        for sent in (None, "", "right", "Bearer", "Bearer wrong", "Bearer right2", "Basic right"):
            headers = {} if sent is None else {"Authorization": sent}
            for method, path in (
                ("PUT", "/policies/p-v1"),
                ("DELETE", "/policies/p-v1"),
                ("POST", "/v1/chat/completions"),
                ("POST", "/v1/completions"),
                ("POST", "/tokenize"),
            ):
                refused = await client.request(method, path, json=body, headers=headers)
                assert refused.status == 401, (sent, method, path)
                text = await refused.text()
                assert "engine.key" in text and "right" not in text
        for path in ("/health", "/v1/models"):
            seen = await client.get(path)
            assert seen.status == 200 and "p-v1" not in await seen.text()
        headers = {"Authorization": "Bearer right"}
        assert (await client.put("/policies/p-v1", json=body, headers=headers)).status == 200
        asked = await client.post("/v1/chat/completions", json=chat(), headers=headers)
        assert asked.status == 200


async def test_a_secret_of_any_bytes_is_refused() -> None:
    app = make_app()
    app[SECRET] = "right"
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nHost: engine\r\nAuthorization: Bearer \xff\r\n\r\n"
        )
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()


async def test_a_chat_has_the_counted_tokens(engine: TestClient[Any, Any]) -> None:
    response = await engine.post("/tokenize", json={"model": "p-v1", "messages": HELLO})
    counted = await response.json()
    answer = await post(engine, return_token_ids=True)
    assert counted["tokens"] == answer["prompt_token_ids"]
    assert counted["count"] == answer["usage"]["prompt_tokens"] == len(counted["tokens"])
    assert counted["max_model_len"] > counted["count"]


async def test_token_ids_and_logprobs_come_only_if_asked(
    engine: TestClient[Any, Any],
) -> None:
    answer = await post(engine)
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


async def test_stream_adds_up_to_the_answer(engine: TestClient[Any, Any]) -> None:
    asked = {"logprobs": True, "return_token_ids": True}
    whole = await post(engine, **asked)
    first, *chunks, last = await events(engine, stream_options={"include_usage": True}, **asked)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    choice = whole["choices"][0]
    assert "".join(c["delta"]["content"] for c in choices) == choice["message"]["content"]
    assert [i for c in choices for i in c["token_ids"]] == choice["token_ids"]
    streamed = [t for c in choices for t in c["logprobs"]["content"]]
    assert [t["token"] for t in streamed] == [t["token"] for t in choice["logprobs"]["content"]]
    assert [c["finish_reason"] for c in choices][-1] == "length"


async def test_requests_join_a_long_answer_and_keep_their_own(engine: TestClient[Any, Any]) -> None:
    alone = [await post(engine, seed=seed, return_token_ids=True) for seed in range(6)]
    async with long_answer(engine) as job:
        together = await asyncio.gather(
            *(post(engine, seed=seed, return_token_ids=True) for seed in range(6))
        )
        assert job.completion.finish_reason == "running"  # nobody waited for its end
    tokens = [[a["choices"][0]["token_ids"] for a in answers] for answers in (alone, together)]
    assert tokens[0] == tokens[1]


async def test_client_that_leaves_frees_the_worker(engine: TestClient[Any, Any]) -> None:
    async with long_answer(engine) as job:
        pass
    await post(engine, max_tokens=1)  # answered after the long one has ended
    assert job.completion.finish_reason == "abort"
    assert 0 < len(job.completion.token_ids) < 480


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "nobody"}, 404, "'nobody' is not loaded; loaded: p-v1"),
        ({"model": None}, 400, "$.model"),
        ({"messages": []}, 400, "$.messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, 400, "'pirate'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "accepts text"),
        ({"temperature": -1}, 400, "$.temperature"),
        ({"temperature": 0.001}, 400, "0.01 to 2"),
        ({"top_p": 0}, 400, "$.top_p"),
        ({"max_tokens": 0}, 400, "$.max_tokens"),
        (
            {"max_tokens": 5000},
            400,
            "max_tokens=5000 does not fit into the context of 'p-v1', 512 tokens",
        ),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "send less"),
        ({"n": 33}, 400, "33 answers"),
        ({"seed": 2**70}, 400, "$.seed"),
        ({"logit_bias": {"5": 100}}, 400, "logit_bias"),
        ({"top_logprobs": 5}, 400, "top_logprobs=5"),
        ({"stop": [""]}, 400, "$.stop"),
        ({"stop": ["x"] * 33}, 400, "$.stop"),
        ({"stop": "x" * 1001}, 400, "$.stop"),
        ({"chat_template_kwargs": {"tokenize": False}}, 400, "leave out tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "refuses the messages"),
        *(
            ({name: value}, 400, f"does not support {name}")
            for name, value in {
                "stop_token_ids": [1],
                "continue_final_message": True,
                "add_generation_prompt": False,
                "chat_template": "x",
                "truncate_prompt_tokens": 2,
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
                "documents": [{}],
                "prompt_logprobs": 1,
                "logprob_token_ids": [1],
                "return_tokens_as_token_ids": True,
                "return_token_offsets": True,
                "return_prompt_text": True,
                "return_assistant_tokens_mask": True,
                "add_special_tokens": True,
                "modalities": ["audio"],
            }.items()
        ),
    ],
)
async def test_bad_request_is_refused_in_openai_shape(
    engine: TestClient[Any, Any], fields: dict[str, Any], status: int, message: str
) -> None:
    response = await engine.post("/v1/chat/completions", json=chat(**fields))
    error = (await response.json())["error"]
    assert response.status == status
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_tokens_of_another_prompt_than_a_chats_are_not_counted(
    engine: TestClient[Any, Any],
) -> None:
    for asked in ({"add_generation_prompt": False}, {"chat_template": "x"}, {"documents": [{}]}):
        response = await engine.post("/tokenize", json=chat(**asked))
        assert response.status == 400
        assert f"does not support {', '.join(asked)}" in await response.text()
    response = await engine.post("/tokenize", json=chat(top_k=5))  # of the sampling
    assert response.status == 200


async def test_fields_with_their_usual_values_are_taken(engine: TestClient[Any, Any]) -> None:
    usual = {"add_generation_prompt": True, "modalities": ["text"], "stop_token_ids": []}
    await post(engine, **usual, skip_special_tokens=True, chat_template_kwargs={})


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    engine: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedPolicy, "prompt", None)
    monkeypatch.setattr(LoadedPolicy, "encode", None)
    text = "x" * 20_000
    fields = {"messages": [{"role": "user", "content": text}]}
    answers = [await engine.post("/v1/chat/completions", json=chat(**fields))]
    answers.append(await engine.post("/tokenize", json=chat(**fields)))
    asked = {"model": "p-v1", "prompt": text}
    answers.append(await engine.post("/v1/completions", json=asked))
    for answer in answers:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("part", ["tools", "arguments"])
async def test_tools_and_calls_that_cannot_fit_are_refused_before_they_are_encoded(
    calling_engine: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(LoadedPolicy, "prompt", None)
    text = "x" * 500_000
    function = {"name": "f", "description": text, "parameters": {}}
    call = {"function": {"name": "f", "arguments": json.dumps({"a": text})}}
    told = {"role": "assistant", "content": "", "tool_calls": [call]}
    fields: dict[str, dict[str, Any]] = {
        "tools": {"tools": [{"type": "function", "function": function}]},
        "arguments": {"messages": [told, {"role": "user", "content": "and?"}]},
    }
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await calling_engine.post(path, json=chat(**fields[part]))
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_is_encoded_while_others_are_answered(
    engine: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, encode = threading.Event(), threading.Event(), LoadedPolicy.prompt

    def long(*arguments: Any) -> list[int]:
        begun.set()
        assert go_on.wait(20)
        return encode(*arguments)

    monkeypatch.setattr(LoadedPolicy, "prompt", long)
    asked = asyncio.create_task(post(engine, max_tokens=1))
    await asyncio.to_thread(begun.wait, 20)
    assert (await engine.get("/v1/models")).status == 200 and not asked.done()
    go_on.set()
    await asked


async def test_the_template_gets_its_variables(engine: TestClient[Any, Any]) -> None:
    assert engine.app is not None
    policy = engine.app[POLICIES].get("p-v1")
    own = policy.tokenizer.chat_template
    policy.tokenizer.chat_template = "{{ mood }}"
    try:
        for mood in "aX", "bY":
            asked = chat(chat_template_kwargs={"mood": mood})
            told = await (await engine.post("/tokenize", json=asked)).json()
            assert policy.tokenizer.decode(told["tokens"]) == mood
    finally:
        policy.tokenizer.chat_template = own


async def test_a_value_that_breaks_the_template_is_the_clients_error(
    engine: TestClient[Any, Any],
) -> None:
    assert engine.app is not None
    policy = engine.app[POLICIES].get("p-v1")
    own = policy.tokenizer.chat_template
    policy.tokenizer.chat_template = "{{ '<' + mood + '>' }}"
    try:
        for path in "/tokenize", "/v1/chat/completions":
            answer = await engine.post(path, json=chat(chat_template_kwargs={"mood": {"a": 1}}))
            assert answer.status == 400
            assert "chat_template_kwargs" in (await answer.json())["error"]["message"]
    finally:
        policy.tokenizer.chat_template = own


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"[" * 100_000])
async def test_a_body_must_be_a_json_object(engine: TestClient[Any, Any], body: bytes) -> None:
    response = await engine.post("/v1/chat/completions", data=body)
    assert response.status == 400
    assert "not a JSON object" in (await response.json())["error"]["message"]


async def test_text_parts_are_joined(engine: TestClient[Any, Any]) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    answers = [
        await post(engine, messages=[{"role": "user", "content": content}])
        for content in ("hello", parts)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]


async def test_failure_while_sampling_reaches_its_waiters_and_the_worker_goes_on(
    engine: TestClient[Any, Any],
) -> None:
    assert engine.app is not None
    policy = engine.app[POLICIES].get("p-v1")
    weight = policy.model.get_output_embeddings().weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    response = await engine.post("/v1/chat/completions", json=chat())
    weight.copy_(kept)
    assert response.status == 500
    assert "logprob nan" in (await response.json())["error"]["message"]
    await post(engine)


async def test_unknown_route_and_large_body_have_openai_shape(engine: TestClient[Any, Any]) -> None:
    assert "error" in await (await engine.get("/v2")).json()
    response = await engine.post("/v1/chat/completions", data=io.BytesIO(b" " * (5 * 2**20)))
    assert response.status == 413
    assert "error" in await response.json()

"""The contract of every engine: ``babylon.serving.engine_protocol``, OpenAI's wire format with
vLLM's token ids, and logprobs of the requested policy."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from babylon.core.errors import ServingError
from babylon.serving.gateway.route_table import Target
from tests.contract.checkpoints import CONTEXT, END, Checkpoints, trainer_logprobs
from tests.contract.engines import HELLO, Answer, EngineUnderTest, asked
from tests.tiny_policy import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOLERANCE = 1e-4  # nats, in fp32


def distance(answer: Answer, path: Path, temperature: float = 1.0) -> float:
    """Largest difference of a logprob to that of the trainer's forward pass of a checkpoint."""
    given = torch.tensor(answer.logprobs, dtype=torch.float64)
    trained = trainer_logprobs(path, answer.prompt_token_ids, answer.token_ids, temperature)
    return float((given - trained).abs().max())


def assert_aligned(answer: Answer) -> None:
    """A logprob for each token, as many as usage counts; an answer that ends ends with the end."""
    assert answer.status == 200, answer.bodies
    counted = len(answer.token_ids)
    prompt = len(answer.prompt_token_ids)
    assert len(answer.logprobs) == counted > 0
    usage = answer.usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, counted)
    assert usage["total_tokens"] == prompt + counted


def assert_text(answer: Answer) -> None:
    """The tokens' text, but perhaps for a character that the answer's end cut through."""
    decoded = TOKENIZER.decode(answer.token_ids, skip_special_tokens=True)
    assert decoded.startswith(answer.text)
    assert not decoded.removeprefix(answer.text).strip("\ufffd")


# policies come and go


async def test_loaded_policy_is_listed_with_what_it_is(
    engine: EngineUnderTest, checkpoints: Checkpoints, base: str, adapters: dict[str, Path]
) -> None:
    cards = await engine.cards()
    for name, path in {base: checkpoints.base, **adapters}.items():
        assert (cards[name]["root"], cards[name]["version"]) == (str(path), 1)
    assert {base, *adapters} <= await engine.client.policies()
    assert {base, *adapters} <= set((await engine.health())["policies"])
    assert (await engine.health())["status"] == "ok"


async def test_same_again_is_a_no_op_and_a_name_never_changes_its_meaning(
    engine: EngineUnderTest, checkpoints: Checkpoints, adapters: dict[str, Path]
) -> None:
    name, path = next(iter(adapters.items()))
    before = await engine.chat(name, seed=1)
    assert (await engine.put(name, path))[0] == 200
    for other in ((checkpoints.adapters[2], 1), (checkpoints.base, 1), (path, 2)):
        status, body = await engine.put(name, *other)
        assert status == 409
        assert "under another name" in body["error"]["message"]
    assert (await engine.chat(name, seed=1)).token_ids == before.token_ids


async def test_bad_paths_are_refused(engine: EngineUnderTest, tmp_path: Path, name: str) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        status, body = await engine.put(name, path)
        assert status == 400
        assert str(path) in body["error"]["message"]
        with pytest.raises(ServingError, match=str(path)):
            await engine.client.load(Target(name, 1, str(path)))
    async with engine.http.put(f"{engine.url}/policies/{name}", data=b"{}") as response:
        assert response.status == 400
        assert "path" in (await response.json())["error"]["message"]
    assert name not in await engine.cards()


async def test_unloaded_policy_finishes_what_it_has_begun_and_answers_nothing_more(
    engine: EngineUnderTest, adapters: dict[str, Path]
) -> None:
    name, other = adapters
    begun = await engine.begin(name, seed=3, max_tokens=300)
    await engine.client.unload(name)
    assert name not in await engine.cards()
    assert (await engine.chat(name)).status == 404
    rest = (begun.begun + await begun.read()).decode().split("\n\n")
    assert rest[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in rest[:-2]]
    begun.close()
    assert Answer(200, chunks).finish_reason in ("stop", "length")
    assert (await engine.chat(other)).status == 200
    with pytest.raises(ServingError, match=name):
        await engine.client.unload(name)


async def test_an_unloaded_policy_comes_back_as_it_was(
    engine: EngineUnderTest, adapters: dict[str, Path]
) -> None:
    name, path = next(iter(adapters.items()))
    before = await engine.chat(name, seed=5)
    await engine.client.unload(name)
    await engine.load(name, path)
    after = await engine.chat(name, seed=5)
    assert after.token_ids == before.token_ids
    assert distance(after, path) < TOLERANCE


# one answer


async def test_answers_have_text_tokens_logprobs_usage(engine: EngineUnderTest, base: str) -> None:
    answer = await engine.chat(base)
    assert_aligned(answer)
    assert_text(answer)
    assert answer.prompt_token_ids == TOKENIZER.apply_chat_template(
        HELLO, add_generation_prompt=True, return_dict=False
    )


async def test_streams_add_up(engine: EngineUnderTest, adapters: dict[str, Path]) -> None:
    name = next(iter(adapters))
    whole = await engine.chat(name, seed=7)
    stream = await engine.chat(name, seed=7, stream=True)
    assert_aligned(stream)
    assert stream.done and len(stream.choices) > 1
    assert stream.choices[0]["delta"]["role"] == "assistant"
    assert stream.bodies[-1]["choices"] == []  # usage comes last, alone
    for part in ("text", "token_ids", "prompt_token_ids", "finish_reason"):
        assert getattr(stream, part) == getattr(whole, part)
    assert stream.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)
    for choice in stream.choices:  # the logprobs of a chunk are those of its tokens
        scored = (choice["logprobs"] or {}).get("content") or []
        assert len(scored) == len(choice.get("token_ids") or [])


async def test_a_chats_tokens_are_counted_without_an_answer(
    engine: EngineUnderTest, base: str
) -> None:
    answer = await engine.chat(base)
    counted = await engine.send(base, json.dumps(asked(base, messages=HELLO)).encode(), "/tokenize")
    assert counted.bodies[0]["tokens"] == answer.prompt_token_ids
    assert counted.bodies[0]["count"] == answer.usage["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_of_a_text_or_of_its_tokens(
    engine: EngineUnderTest, checkpoints: Checkpoints, base: str, stream: bool
) -> None:
    ids = TOKENIZER.encode("buy the dip")
    fields = {"seed": 2, "temperature": 0.6, "stream": stream}
    answers = [await engine.complete(base, prompt, **fields) for prompt in ("buy the dip", ids)]
    for answer in answers:
        assert_aligned(answer)
        assert answer.prompt_token_ids == ids
        assert_text(answer)
        assert distance(answer, checkpoints.base, temperature=0.6) < TOLERANCE
    assert answers[0].token_ids == answers[1].token_ids


async def test_same_seed_same_answer(engine: EngineUnderTest, base: str) -> None:
    answers = [(await engine.chat(base, seed=seed)).token_ids for seed in (11, 11, 12)]
    assert answers[0] == answers[1] != answers[2]


async def test_greedy_answers_are_the_likeliest_tokens(engine: EngineUnderTest, base: str) -> None:
    answers = [(await engine.chat(base, seed=seed, temperature=0)).token_ids for seed in (1, 2)]
    assert answers[0] == answers[1]


async def test_answers_end_at_end_token_or_limit(engine: EngineUnderTest, base: str) -> None:
    answers = [await engine.chat(base, seed=seed, max_tokens=60) for seed in range(12)]
    ends = {answer.finish_reason for answer in answers}
    assert ends == {"stop", "length"}
    for answer in answers:
        assert_aligned(answer)
        assert (answer.token_ids[-1] == END) is (answer.finish_reason == "stop")
        assert len(answer.token_ids) == 60 or answer.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_answers(engine: EngineUnderTest, base: str, stream: bool) -> None:
    free = await engine.chat(base, seed=4, max_tokens=60)
    stop = next(free.text[i : i + 2] for i in range(5, 50) if free.text[i : i + 2].isascii())
    stopped = await engine.chat(base, seed=4, max_tokens=60, stop=[stop], stream=stream)
    assert_aligned(stopped)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


# logprobs are the policy's own


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_trainers_forward_pass(
    engine: EngineUnderTest,
    checkpoints: Checkpoints,
    base: str,
    adapters: dict[str, Path],
    temperature: float,
) -> None:
    for name, path in {base: checkpoints.base, **adapters}.items():
        sampling = {"temperature": temperature, "max_tokens": 100}
        answers = [
            await engine.chat(name, **sampling),
            await engine.chat(name, stream=True, **sampling),
        ]
        for answer in answers:
            assert_aligned(answer)
            assert distance(answer, path, temperature) < TOLERANCE


async def test_adapters_loaded_under_load_are_never_mixed_up(
    engine: EngineUnderTest,
    checkpoints: Checkpoints,
    base: str,
    adapters: dict[str, Path],
    name: str,
) -> None:
    """Streams of a model and its adapters, all with one prompt, while a third adapter comes."""
    third = checkpoints.adapters[2]
    served = {base: checkpoints.base, **adapters}
    answers: list[tuple[Path, Answer]] = []
    loaded = asyncio.Event()

    async def client(policy: str, path: Path, seed: int) -> None:
        while not loaded.is_set():
            answers.append((path, await engine.chat(policy, seed=seed, stream=True)))

    clients = [
        asyncio.create_task(client(policy, path, seed))
        for seed in range(2)
        for policy, path in served.items()
    ]
    while len(answers) < len(clients):  # all of them are under way
        await asyncio.sleep(0.01)
    await engine.load(name, third)
    answers += [(third, await engine.chat(name, seed=seed)) for seed in range(3)]
    loaded.set()
    await asyncio.gather(*clients)
    await engine.client.unload(name)

    paths = {*served.values(), third}
    assert {path for path, _ in answers} == paths
    for path, answer in answers:
        assert_aligned(answer)
        assert distance(answer, path) < TOLERANCE
        assert all(distance(answer, other) > 0.1 for other in paths - {path})


# refusals


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": []}, 400),
        ({"messages": "hello"}, 400),
        ({"messages": [{"role": "user", "content": "x" * 2 * CONTEXT}]}, 400),
        ({"max_tokens": 10 * CONTEXT}, 400),
        ({"max_tokens": 0}, 400),
        ({"temperature": -1}, 400),
        ({"temperature": "hot"}, 400),
        ({"top_p": 0}, 400),
    ],
)
async def test_bad_request_is_refused_in_openai_shape(
    engine: EngineUnderTest, base: str, fields: dict[str, Any], status: int
) -> None:
    answer = await engine.send(
        base, json.dumps(asked(base, **{"messages": HELLO, **fields})).encode()
    )
    assert answer.status == status, answer.bodies
    assert answer.error["message"]
    assert {"type", "code"} <= answer.error.keys()


async def test_an_unknown_policy_is_a_404_with_its_name(engine: EngineUnderTest, base: str) -> None:
    answer = await engine.chat("nobody-v1")
    assert answer.status == 404
    async with engine.http.delete(f"{engine.url}/policies/nobody-v1") as response:
        assert response.status == 404
        assert "nobody-v1" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe"])
async def test_a_body_must_be_a_json_object(engine: EngineUnderTest, body: bytes) -> None:
    async with await engine.client.call("/v1/chat/completions", body, "policy-v0") as response:
        assert response.status == 400
        assert json.loads(response.begun + await response.read())["error"]["message"]

"""Forced tool calls and JSON, asked by OpenAI's client of a policy that would say anything."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError

from babylon.policies.tokenizer import CHAT_TEMPLATE
from babylon.serving.engine import grammar
from babylon.serving.engine.engine_process import make_app
from babylon.serving.engine.grammar import Constraint
from babylon.serving.engine.loaded_policies import load
from tests.tiny_policy import tiny_model, tiny_tokenizer

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LIKELY = '"}]:, 1\n'  # often enough that strings and objects end
TEXTS = st.text('ab"\\/é\n<', max_size=6)
LEAVES = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
    st.builds(
        lambda values: {"enum": values}, st.lists(TEXTS, min_size=1, max_size=3, unique=True)
    ),
    st.builds(lambda value: {"const": value}, st.one_of(TEXTS, st.integers(-9, 9), st.none())),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 2000),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string"}]),
    st.just({"type": ["string", "null"], "maxLength": 3}),
)


def objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with some properties required, which do or do not say that there are no others."""
    properties = st.dictionaries(TEXTS, schemas, max_size=3)
    chosen = st.tuples(properties, st.sets(st.integers(0, 2)), st.booleans())
    return chosen.map(
        lambda made: {
            "type": "object",
            "properties": made[0],
            "required": [name for i, name in enumerate(made[0]) if i in made[1]],
            **({"additionalProperties": False} if made[2] else {}),
        }
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda of, most: {"type": "array", "items": of, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that says any byte at any place, some more often than the rest."""
    directory = tmp_path_factory.mktemp("policy")
    tokenizer, model = tiny_tokenizer(), tiny_model(1, max_position_embeddings=4096)
    tokenizer.chat_template = CHAT_TEMPLATE
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 10.0  # the final hidden state is 8 there, else 0
        model.lm_head.weight[[*tokenizer.encode(LIKELY), 258], 0] += 0.7
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@asynccontextmanager
async def engine_of(path: Path) -> AsyncIterator[AsyncOpenAI]:
    async with TestServer(make_app()) as server:
        url = str(server.make_url("/v1"))
        async with AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            source = {"path": str(path), "version": 1}
            await client._client.put(url.replace("/v1", "/policies/p"), json=source)
            yield client


@pytest.fixture
async def client(path: Path) -> AsyncIterator[AsyncOpenAI]:
    async with engine_of(path) as client:
        yield client


async def ask(client: AsyncOpenAI, *, stream: bool, **fields: Any) -> Any:
    """The one choice of an answer, whole or as the client's helper adds up a stream."""
    asked = {"model": "p", "messages": HELLO, "max_tokens": 400, **fields}
    if not stream:
        return (await client.chat.completions.create(**asked)).choices[0]
    async with client.chat.completions.stream(**asked) as events:
        return (await events.get_final_completion()).choices[0]


def tool(name: str, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def answers(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.slow
@settings(max_examples=3)
@given(
    made=st.lists(st.tuples(SCHEMAS, objects(SCHEMAS), objects(SCHEMAS)), min_size=6, max_size=6)
)
def test_forced_calls_and_json_fit_any_schema(made: list[tuple[Any, Any, Any]], path: Path) -> None:
    async def run() -> None:
        async with engine_of(path) as client:
            checks = [
                check(client, seed, answer, {"a": one, "b": other})
                for seed, (answer, one, other) in enumerate(made)
            ]
            await asyncio.gather(*checks)

    asyncio.run(run())


async def check(client: AsyncOpenAI, seed: int, answer: Any, parameters: dict[str, Any]) -> None:
    stream = bool(seed % 2)
    tools = [tool(name, schema) for name, schema in parameters.items()]
    named = {"type": "function", "function": {"name": "b"}}
    json_only = {"response_format": answers(answer)}
    either = json_only | {"tools": tools, "parallel_tool_calls": False}
    ways: list[dict[str, Any]] = [
        {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": tools, "tool_choice": named, "parallel_tool_calls": False},
        json_only,
        either,
    ]
    choices = await asyncio.gather(*(ask(client, seed=seed, stream=stream, **way) for way in ways))
    for way, choice in zip(ways, choices, strict=True):
        said = choice.message.content
        for call in choice.message.tool_calls or ():
            assert way.get("tool_choice") != named or call.function.name == "b"
            jsonschema.validate(json.loads(call.function.arguments), parameters[call.function.name])
        if choice.message.tool_calls:
            assert (choice.finish_reason, said) == ("tool_calls", "" if stream else None)
        else:
            assert "tool_choice" not in way and choice.finish_reason == "stop"
            jsonschema.validate(json.loads(said), answer)


async def test_several_calls_are_forced_in_one_answer(client: AsyncOpenAI) -> None:
    tools = [tool("ping", None), tool("pong", {"type": "object", "properties": {}})]
    forced = {"tools": tools, "tool_choice": "required", "temperature": 2}
    asked = (ask(client, stream=False, seed=seed, **forced) for seed in range(6))
    called = [choice.message.tool_calls for choice in await asyncio.gather(*asked)]
    assert {call.function.arguments for calls in called for call in calls} == {"{}"}
    assert {call.function.name for calls in called for call in calls} == {"ping", "pong"}
    assert max(map(len, called)) > 1
    one = await ask(client, stream=False, seed=0, parallel_tool_calls=False, **forced)
    assert len(one.message.tool_calls) == 1


async def test_json_mode_writes_objects(client: AsyncOpenAI) -> None:
    ended = 0
    for seed in range(6):
        choice = await ask(client, stream=False, seed=seed, response_format={"type": "json_object"})
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
            ended += 1
    assert ended > 3


async def test_a_reported_logprob_is_that_of_the_allowed_tokens(
    client: AsyncOpenAI, path: Path
) -> None:
    """Also at a temperature, with a nucleus, greedily; and beside free answers."""
    schema = {"enum": ["A", "B", "C"]}
    ways: list[dict[str, float]] = [{}, {"temperature": 0.5}, {"top_p": 0.6}, {"temperature": 0}]
    drawn = {"logprobs": True, "extra_body": {"return_token_ids": True}, "max_tokens": 9}

    async def whole(**fields: Any) -> Any:
        asked = {"model": "p", "messages": HELLO, **drawn, **fields}
        return (await client.chat.completions.create(**asked)).choices[0]

    free = await asyncio.gather(*(whole(seed=seed) for seed in range(3)))
    mixed = await asyncio.gather(
        *(whole(seed=seed) for seed in range(3)),
        *(whole(seed=1, response_format=answers(schema), top_logprobs=4, **way) for way in ways),
    )
    assert [choice.token_ids for choice in mixed[:3]] == [choice.token_ids for choice in free]
    tokenizer, model = tiny_tokenizer(), tiny_model(1)
    model = type(model).from_pretrained(path).eval()
    tokenizer.chat_template = CHAT_TEMPLATE
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    letters = tokenizer.encode("ABC")
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokenizer.encode('"')]])).logits[0, -1]
    for choice, way in zip(mixed[3:], ways, strict=True):
        scores = torch.log_softmax(logits[letters] / (way.get("temperature") or 1), 0)
        chances = dict(zip("ABC", scores.tolist(), strict=True))
        said = choice.logprobs.content
        assert json.loads(choice.message.content) == said[1].token
        assert [token.logprob for token in (said[0], *said[2:])] == pytest.approx([0] * 3)
        if "top_p" not in way:
            assert said[1].logprob == pytest.approx(chances[said[1].token], abs=1e-4)
            likeliest = sorted(chances, key=lambda letter: -chances[letter])
            assert [top.token for top in said[1].top_logprobs] == likeliest


async def test_an_answer_that_is_cut_says_so(client: AsyncOpenAI) -> None:
    asked = {"tools": [tool("a", {"properties": {"x": {"minLength": 40, "type": "string"}}})]}
    choice = await ask(client, stream=False, tool_choice="required", max_tokens=45, **asked)
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


async def test_a_grammar_that_fails_costs_only_its_own_answer(
    client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, taken = Constraint.advance, []

    def failing(self: Constraint, token_id: int) -> None:
        taken.append(token_id)
        advance(self, token_id)
        if len(taken) == 3:
            self.problem = "too complex"

    monkeypatch.setattr(Constraint, "advance", failing)
    wanted = {"stream": False, "response_format": {"type": "json_object"}}
    failed, free = await asyncio.gather(
        ask(client, **wanted), ask(client, stream=False, max_tokens=30), return_exceptions=True
    )
    assert isinstance(failed, BadRequestError) and "too complex" in str(failed)
    assert free.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format {'type': 'xml'}"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"response_format": answers({"type": "strin"})}, "JSON schema: Invalid type: strin"),
        ({"response_format": answers({"not": {}})}, 'Unimplemented keys: ["not"]'),
        ({"response_format": answers({"$ref": "https://x.y/z"})}, "is not present in a registry"),
        ({"tool_choice": "required"}, "tool_choice 'required'"),
        ({"tools": [tool("a", {})], "tool_choice": {"function": "a"}}, "tool_choice {'function"),
        ({"tools": [{"type": "x"}], "tool_choice": "required"}, "send a function with a name"),
        ({"tools": [tool("a", {})], "tool_choice": "never"}, "tool_choice 'never'"),
        (
            {
                "tools": [tool("a", {})],
                "tool_choice": {"type": "function", "function": {"name": "b"}},
            },
            "the name of one of the tools",
        ),
        ({"tools": [tool("a", {"type": "array"})], "tool_choice": "required"}, "object's schema"),
    ],
)
async def test_a_constraint_that_cannot_be_kept_is_refused(
    client: AsyncOpenAI, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        await ask(client, stream=False, **fields)
    assert message in refused.value.body["message"]  # type: ignore[index]


async def test_a_schema_that_is_too_large_is_refused_before_it_is_sampled(
    client: AsyncOpenAI,
) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(600)}}
    with pytest.raises(BadRequestError, match="send a smaller schema"):
        await ask(client, stream=True, response_format=answers(schema))


async def test_a_deep_schema_is_refused(client: AsyncOpenAI) -> None:
    schema: Any = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    with pytest.raises(BadRequestError, match="recursion limit"):
        await ask(client, stream=False, response_format=answers(schema))


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        (  # properties of several parts add up
            {
                "type": "object",
                "properties": {"a": {"const": 1}},
                "required": ["a"],
                "anyOf": [{"properties": {"b": {"const": 2}}, "required": ["b"]}],
            },
            {"a": 1, "b": 2},
        ),
        (
            {
                "$defs": {"one": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
                "allOf": [{"$ref": "#/$defs/one"}, {"required": ["b"]}],
                "type": "object",
                "properties": {"b": {"const": 2}},
            },
            {"a": 1, "b": 2},
        ),
        (  # a required property without a description may be anything
            {"type": "object", "properties": {}, "required": ["z"]},
            None,
        ),
        (  # a property may have a keyword's name
            {
                "type": "object",
                "properties": {"properties": {"const": 1}, "required": {"const": 2}},
                "required": ["properties", "required"],
            },
            {"properties": 1, "required": 2},
        ),
    ],
)
async def test_closing_an_object_forbids_nothing_that_is_described(
    client: AsyncOpenAI, schema: Any, valid: Any
) -> None:
    choice = await ask(
        client, stream=False, response_format=answers(schema), temperature=0.3, max_tokens=150
    )
    text = choice.message.content
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(text), schema)
        assert valid is None or valid.items() <= json.loads(text).items()
    else:  # other properties are allowed here, and the policy goes on with them
        assert all(f'"{name}"' in text for name in valid or {"z": 0})


def test_policies_of_one_base_share_what_grammars_need(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = load("one", str(path), 1), load("two", str(path), 2)
    monkeypatch.setattr(grammar, "from_tokenizer", None)  # nothing is prepared at a call
    for policy in (first, second):
        policy.constraint('start: "a"')
    assert first._grammars._tokens is second._grammars._tokens

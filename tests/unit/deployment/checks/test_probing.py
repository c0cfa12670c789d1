"""Probes over real HTTP, of gateways that answer what no gateway should."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.probes import IDENTITY_PATH, Ask, ProbeAnswer, identity_proof
from babylon.deployment.checks.probing import Faulty, Probe, ProbeTarget, probe
from babylon.serving import pinned_calls
from babylon.store.gateways import GatewayRow

KEYS = {"g0": "sk-first", "g1": "sk-second"}
ASKED = ProbeTarget(model="babylon", policy_version=7, champion_version=5, keys=KEYS)
QUESTIONS = [
    (n, Ask(messages=[{"role": "user", "content": "x"}], max_tokens=4, seed=n)) for n in range(4)
]
Fault = Callable[[dict[str, Any]], None]


def sound(name: str) -> dict[str, Any]:
    """A gateway's sound answer."""
    scores = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.0}]
    choice = {
        "message": {"role": "assistant", "content": "ab"},
        "token_ids": [3, 4],
        "logprobs": {"content": scores},
        "finish_reason": "stop",
    }
    usage = {"completion_tokens": 2}
    return {"model": name, "choices": [choice], "prompt_token_ids": [1, 2], "usage": usage}


@asynccontextmanager
async def gateways(
    count: int = 1, fault: Fault | None = None, statuses: list[int] | None = None
) -> AsyncIterator[tuple[list[GatewayRow], list[dict[str, Any]]]]:
    """Running gateways and the requests that they got; ``fault`` spoils the policy's answers,
    ``statuses`` are those of the policy's first answers."""
    seen: list[dict[str, Any]] = []
    left = list(statuses or [])

    async def chat(request: web.Request) -> web.Response:
        asked = await request.json()
        seen.append(asked | {"key": request.headers["Authorization"]})
        body, version = sound(asked["model"]), asked["model"].removeprefix("babylon-v")
        if version == "7":
            if left and (status := left.pop(0)) != 200:
                return web.json_response({"error": "busy"}, status=status)
            if fault:
                fault(body)
        served = body.pop("served", version)
        return web.json_response(body, headers={"x-model-version": served})

    async def identity(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.Response(text=identity_proof(KEYS[name], name, request.query["nonce"]))

    app = web.Application()
    app.router.add_get(f"/{{name}}{IDENTITY_PATH}", identity)
    app.router.add_post("/{name}/v1/chat/completions", chat)
    async with TestServer(app, host="127.0.0.1") as server:
        url = str(server.make_url("")).rstrip("/")
        names = [f"g{n}" for n in range(count)]
        rows = [GatewayRow(gateway_id=one, url=f"{url}/{one}", route_version=1) for one in names]
        yield rows, seen


async def faults_of(fault: Fault) -> list[str]:
    async with gateways(fault=fault) as (live, _):
        found = await probe(live, QUESTIONS, ASKED)
    assert all(isinstance(one.champion, ProbeAnswer) for one in found)
    return [str(one.policy) for one in found if isinstance(one.policy, Faulty)]


async def test_policy_and_champion_get_the_same_questions_under_their_own_names() -> None:
    async with gateways(count=2) as (live, requests):
        found = await probe(live, QUESTIONS, ASKED)
    assert [(one.prompt, one.gateway[:2]) for one in found] == [
        (0, "g0"), (2, "g0"), (1, "g1"), (3, "g1"),
    ]  # fmt: skip
    assert all(isinstance(one.policy, ProbeAnswer) and one.policy.ended for one in found)
    assert {request["key"] for request in requests} == {f"Bearer {key}" for key in KEYS.values()}
    for seed in range(4):
        pair = [deepcopy(request) for request in requests if request["seed"] == seed]
        assert {request.pop("model") for request in pair} == {"babylon-v7", "babylon-v5"}
        assert pair[0] == pair[1]
        assert "user" not in pair[0]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda body: body["choices"][0]["token_ids"].pop(), "1 token ids, 2 logprobs"),
        (lambda body: body["choices"][0]["logprobs"]["content"].pop(), "2 token ids, 1 logprobs"),
        (lambda body: body["usage"].update(completion_tokens=3), "usage says 3 tokens"),
        (lambda body: body.pop("prompt_token_ids"), "0 prompt ids"),
        (lambda body: body.update(model="babylon-v5"), "'babylon-v5', version 7, answered"),
        (lambda body: body.update(served="5"), "version 5, answered for 'babylon-v7'"),
        (lambda body: body["choices"].clear(), "not a chat completion"),
    ],
)
async def test_an_answer_that_contradicts_itself_is_no_answer(fault: Fault, told: str) -> None:
    faults = await faults_of(fault)
    assert len(faults) == len(QUESTIONS)
    assert all(told in one for one in faults)


async def test_a_logprob_that_json_has_no_word_for_is_nan() -> None:
    def fault(body: dict[str, Any]) -> None:
        body["choices"][0]["logprobs"]["content"][0]["logprob"] = None

    async with gateways(fault=fault) as (live, _):
        (first, *_) = await probe(live, QUESTIONS, ASKED)
    assert isinstance(first.policy, ProbeAnswer)
    assert math.isnan(first.policy.logprobs[0])


async def test_only_busy_gateways_are_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_calls, "PAUSE_S", 0)
    async with gateways(statuses=[429, 503, 200, 404]) as (live, requests):
        found = await probe(live, QUESTIONS[:1], ASKED)
        assert isinstance(found[0].policy, ProbeAnswer)
        (refused,) = await probe(live, QUESTIONS[1:2], ASKED)
    assert isinstance(refused, Probe)
    assert str(refused.policy).startswith("404 ")
    assert len([one for one in requests if one["model"] == "babylon-v7"]) == 4


async def test_a_gateway_that_does_not_prove_who_it_is_gets_no_key() -> None:
    wrong: dict[str, dict[str, str]] = {
        "restart it": {},
        "another program answers": {"g0": "sk-other"},
    }
    async with gateways() as (live, requests):
        for told, keys in wrong.items():
            (refused,) = await probe(live, QUESTIONS[:1], replace(ASKED, keys=keys))
            assert isinstance(refused.policy, Faulty) and told in refused.policy.problem
            assert refused.champion == refused.policy
    assert requests == []


async def test_a_gateway_that_is_gone_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_calls, "PAUSE_S", 0)
    async with gateways() as (live, _):
        pass
    (gone,) = await probe(live, QUESTIONS[:1], ASKED)
    assert isinstance(gone.policy, Faulty) and isinstance(gone.champion, Faulty)

"""Probes: the same questions to policy and champion at every live gateway.

A probe asks for a policy by its immutable name. It is a call without agent and trajectory, with arm
``pinned``. Training reads calls by trajectory, and experiments count the other two arms, so neither
sees probes.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import aiohttp
import msgspec

from babylon.core.errors import ServingError
from babylon.core.probes import Ask, ProbeAnswer
from babylon.serving import pinned_calls
from babylon.store.gateways import GatewayRow

AT_ONCE = 64  # calls at one gateway; few enough to leave agents their places


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """The reason why a probe has no sound answer."""

    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One question to one gateway, with the answers of policy and champion."""

    prompt: int  # index of the golden prompt
    gateway: str
    policy: ProbeAnswer | Faulty
    champion: ProbeAnswer | Faulty


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """The two policies to ask. ``keys``: gateway id → the key of its own for probes."""

    model: str
    policy_version: int
    champion_version: int
    keys: Mapping[str, str] = field(repr=False)


Question = tuple[int, Ask]  # index of the golden prompt, question


async def probe(
    gateways: Sequence[GatewayRow], questions: Sequence[Question], target: ProbeTarget
) -> list[Probe]:
    """Ask each question once, at the gateways in turn.

    A gateway first proves that it is the one that announced the address. Otherwise another gateway
    could answer in its place at an address such as ``localhost``.
    """
    async with pinned_calls.session() as session:
        found = await asyncio.gather(
            *(
                _probe_one(session, gateway, questions[number :: len(gateways)], target)
                for number, gateway in enumerate(gateways)
            )
        )
    return [probe for probes in found for probe in probes]


async def _probe_one(
    session: aiohttp.ClientSession,
    gateway: GatewayRow,
    questions: Sequence[Question],
    target: ProbeTarget,
) -> list[Probe]:
    room, key = asyncio.Semaphore(AT_ONCE), target.keys.get(gateway.gateway_id)
    place = session, gateway, target
    other = await pinned_calls.other_program(session, gateway, key)

    async def answer(version: int, ask: Ask) -> ProbeAnswer | Faulty:
        async with room:
            return Faulty(problem=other) if other else await _ask(*place, version, ask)

    async def both(prompt: int, ask: Ask) -> Probe:
        policy, champion = await asyncio.gather(
            answer(target.policy_version, ask), answer(target.champion_version, ask)
        )
        return Probe(prompt=prompt, gateway=str(gateway), policy=policy, champion=champion)

    return await asyncio.gather(*(both(prompt, ask) for prompt, ask in questions))


async def _ask(
    session: aiohttp.ClientSession,
    gateway: GatewayRow,
    target: ProbeTarget,
    version: int,
    ask: Ask,
) -> ProbeAnswer | Faulty:
    name = f"{target.model}-v{version}"
    body = {
        "model": name,
        "messages": ask.messages,
        "max_tokens": ask.max_tokens,
        "temperature": 1.0,
        "seed": ask.seed,
        "logprobs": True,
        "return_token_ids": True,
    }
    try:
        key = target.keys[gateway.gateway_id]
        answer, served = await pinned_calls.completion(session, gateway, key, body)
    except ServingError as error:
        return Faulty(problem=str(error))
    return _checked(answer, name, version, served)


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Completion(msgspec.Struct):
    """The fields of a chat completion that are read."""

    model: str
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    usage: _Usage
    prompt_token_ids: list[int] | None = None


def _checked(body: bytes, name: str, version: int, served: str | None) -> ProbeAnswer | Faulty:
    """Decode an answer. Refuse it if it is another policy's or contradicts itself."""
    try:
        answer = msgspec.json.decode(body, type=_Completion)
    except msgspec.DecodeError as error:
        return Faulty(problem=f"not a chat completion: {error}")
    if answer.model != name or served != str(version):
        return Faulty(problem=f"{answer.model!r}, version {served}, answered for {name!r}")
    (choice,) = answer.choices
    prompt = answer.prompt_token_ids or choice.prompt_token_ids or []
    ids, counted = choice.token_ids or [], answer.usage.completion_tokens
    scores = (choice.logprobs.content if choice.logprobs else None) or []
    if not (prompt and ids and len(ids) == len(scores) == counted):
        return Faulty(
            problem=f"{len(prompt)} prompt ids, {len(ids)} token ids, {len(scores)} logprobs, but"
            f" usage says {counted} tokens"
        )
    return ProbeAnswer(
        prompt_token_ids=prompt,
        token_ids=ids,
        logprobs=[math.nan if one.logprob is None else one.logprob for one in scores],
        text=choice.message.content or "",
        ended=choice.finish_reason == "stop",
    )

"""Probes: the same questions to policy and champion at every live gateway.

A probe asks for a policy by its immutable name. It is a call without agent and trajectory, with arm
``pinned``. Training reads calls by trajectory, and experiments count the other two arms, so neither
sees probes.
"""

import asyncio
import hmac
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import aiohttp
import msgspec

from babylon.core.probes import IDENTITY_PATH, Ask, ProbeAnswer, identity_proof
from babylon.store.gateways import GatewayRow

TIMEOUT_S = 300.0  # one call, including its wait in the queue
AT_ONCE = 64  # calls at one gateway; few enough to leave agents their places
_IDENTITY_TIMEOUT = aiohttp.ClientTimeout(total=5)
_BUSY, _TRIES, _PAUSE_S = (429, 503), 5, 1.0


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
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
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
    other = await _other(session, gateway, key)

    async def answer(version: int, ask: Ask) -> ProbeAnswer | Faulty:
        async with room:
            return other or await _ask(session, gateway, target, version, ask)

    async def both(prompt: int, ask: Ask) -> Probe:
        policy, champion = await asyncio.gather(
            answer(target.policy_version, ask), answer(target.champion_version, ask)
        )
        return Probe(prompt=prompt, gateway=str(gateway), policy=policy, champion=champion)

    return await asyncio.gather(*(both(prompt, ask) for prompt, ask in questions))


async def _other(
    session: aiohttp.ClientSession, gateway: GatewayRow, key: str | None
) -> Faulty | None:
    """Return the reason why the gateway at the address is not the one that announced it."""
    if key is None:  # the home's key could reach another program there
        return Faulty(
            problem=f"{gateway.gateway_id} is of an earlier version, which cannot prove that it"
            " answers there: restart it with this version"
        )
    nonce = secrets.token_hex(16)
    url = f"{gateway.url.rstrip('/')}{IDENTITY_PATH}?nonce={nonce}"
    problem = ""
    for attempt in range(_TRIES):
        await asyncio.sleep(attempt and _PAUSE_S)
        try:
            async with session.get(url, timeout=_IDENTITY_TIMEOUT) as response:
                said = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
            continue
        if hmac.compare_digest(said, identity_proof(key, gateway.gateway_id, nonce).encode()):
            return None
        return Faulty(
            problem=f"another program answers at {gateway.url}: set GATEWAY_ADDRESS of"
            f" {gateway.gateway_id} to an address of its own that this machine reaches"
        )
    return Faulty(problem=f"nothing answers at {gateway.url} ({problem})")


async def _ask(
    session: aiohttp.ClientSession,
    gateway: GatewayRow,
    target: ProbeTarget,
    version: int,
    ask: Ask,
) -> ProbeAnswer | Faulty:
    name = f"{target.model}-v{version}"
    # Its own key, never the home's, which another program at the address could use.
    headers = {"Authorization": f"Bearer {target.keys[gateway.gateway_id]}"}
    body = {
        "model": name,
        "messages": ask.messages,
        "max_tokens": ask.max_tokens,
        "temperature": 1.0,
        "seed": ask.seed,
        "logprobs": True,
        "return_token_ids": True,
    }
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(_PAUSE_S)
        try:
            url = f"{gateway.url.rstrip('/')}/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                if response.status == 200:
                    served = response.headers.get("x-model-version")
                    return _checked(await response.read(), name, version, served)
                problem = f"{response.status} {(await response.text())[:200]}"
                if response.status not in _BUSY:
                    return Faulty(problem=problem)
        except TimeoutError:
            return Faulty(problem=f"no answer within {TIMEOUT_S:g} s")
        except aiohttp.ClientError as error:
            problem = str(error) or type(error).__name__
    return Faulty(problem=problem)


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

"""Asking the live gateways: the same questions to policy and champion, under their immutable names.

Probes are calls like any other, but of no agent and no trajectory, with arm ``pinned``: training
reads calls by trajectory and experiments count the two arms, so neither ever sees them.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import aiohttp
import msgspec

from babylon.core.probes import Ask, ProbeAnswer
from babylon.store.gateways import GatewayRow

TIMEOUT_S = 300.0  # of one call, waiting for a place included
AT_ONCE = 64  # calls of one gateway, half of them the champion's: its agents keep their places
_BUSY, _TRIES, _PAUSE_S = (429, 503), 5, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """Instead of an answer: what came was none, or contradicts itself."""

    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One question to one gateway, and what the policy and the champion made of it."""

    prompt: int  # in the golden prompts
    gateway: str
    policy: ProbeAnswer | Faulty
    champion: ProbeAnswer | Faulty


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whom the questions are for: two versions of one model. ``key`` opens the gateways."""

    model: str
    policy_version: int
    champion_version: int
    key: str = field(repr=False)


Question = tuple[int, Ask]  # the golden prompt that it is of


async def probe(
    gateways: Sequence[GatewayRow], questions: Sequence[Question], asked: Asked
) -> list[Probe]:
    """The questions in turn to the gateways, each of them once."""
    headers = {"Authorization": f"Bearer {asked.key}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        found = await asyncio.gather(
            *(
                _probe_one(session, gateway, questions[number :: len(gateways)], asked)
                for number, gateway in enumerate(gateways)
            )
        )
    return [probe for probes in found for probe in probes]


async def _probe_one(
    session: aiohttp.ClientSession,
    gateway: GatewayRow,
    questions: Sequence[Question],
    asked: Asked,
) -> list[Probe]:
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(version: int, ask: Ask) -> ProbeAnswer | Faulty:
        async with room:
            return await _ask(session, gateway, asked.model, version, ask)

    async def both(prompt: int, ask: Ask) -> Probe:
        policy, champion = await asyncio.gather(
            answer(asked.policy_version, ask), answer(asked.champion_version, ask)
        )
        return Probe(prompt=prompt, gateway=str(gateway), policy=policy, champion=champion)

    return await asyncio.gather(*(both(prompt, ask) for prompt, ask in questions))


async def _ask(
    session: aiohttp.ClientSession, gateway: GatewayRow, model: str, version: int, ask: Ask
) -> ProbeAnswer | Faulty:
    name = f"{model}-v{version}"
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
            async with session.post(url, json=body) as response:
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
    """What of a chat completion is read."""

    model: str
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    usage: _Usage
    prompt_token_ids: list[int] | None = None


def _checked(body: bytes, name: str, version: int, served: str | None) -> ProbeAnswer | Faulty:
    """The answer, if it is of the policy that was asked for and its parts fit together."""
    try:
        answer = msgspec.json.decode(body, type=_Completion)
    except msgspec.DecodeError as error:
        return Faulty(problem=f"no answer of a chat: {error}")
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

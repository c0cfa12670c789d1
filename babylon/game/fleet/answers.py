"""Sources of a fleet's replies: an OpenAI-compatible endpoint, scripts, or a numeric policy.

An ``Answer`` is a function from an agent's turn to its reply. Tests and programs may pass their
own.
"""

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random

import openai

from babylon.core.errors import ServingError
from babylon.core.numeric_manifest import read_manifest
from babylon.game.market.market import Seat
from babylon.game.market.orders import MAX_REPLY_TOKENS, render_decision
from babylon.game.market.transcripts import draw_agent

TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An agent's reply to one observation."""

    text: str
    model: str
    model_version: str | None = None
    latency_ms: int | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """An agent's turn: its identity, its step, the chat messages and its seat in the market."""

    agent_id: str
    trajectory_id: str
    step: int
    messages: list[dict[str, str]]
    game: Seat


Answer = Callable[[Turn], Coroutine[None, None, Reply]]


def llm_answers(client: openai.AsyncOpenAI, model: str, seed: int) -> Answer:
    """Return an ``Answer`` that asks an OpenAI-compatible endpoint.

    Headers carry the agent, trajectory and step. Each call has a seed, so that an engine that
    honours seeds reproduces the play.
    """

    async def answer(turn: Turn) -> Reply:
        started = time.monotonic()
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=turn.messages,  # type: ignore[arg-type]
                temperature=TEMPERATURE,
                max_tokens=MAX_REPLY_TOKENS,
                seed=call_seed(seed, turn),
                extra_headers={
                    "x-babylon-agent": turn.agent_id,
                    "x-babylon-trajectory": turn.trajectory_id,
                    "x-babylon-step": str(turn.step),
                },
            )
        except openai.OpenAIError as error:
            raise ServingError(
                f"{turn.agent_id} got no answer from {client.base_url}: {error};"
                " is `babylon serve` (or `babylon up`) running there?"
            ) from error
        completion = raw.parse()
        return Reply(
            text=completion.choices[0].message.content or "",
            model=completion.model,
            model_version=raw.headers.get("x-model-version"),
            call_id=raw.headers.get("x-call-id"),
            latency_ms=round((time.monotonic() - started) * 1000),
        )

    return answer


def scripted_answers(seed: int) -> Answer:
    """Return an ``Answer`` by scripted agents of mixed skill, one script per agent and scenario."""

    async def answer(turn: Turn) -> Reply:
        who = f"{seed}:{turn.game.scenario.scenario_id}:{turn.agent_id}"
        name, agent = draw_agent(Random(who), turn.game.scenario.rules)
        decision = agent(turn.game, Random(call_seed(seed, turn)))
        return Reply(render_decision(decision), model=f"scripted-{name}")

    return answer


def numeric_answers(path: Path) -> Answer:
    """Return an ``Answer`` by an exported numeric policy.

    Raises:
        ModelError: It does not load.
    """
    from babylon.game.envs.numeric_play import numeric_decisions  # gymnasium is slow to import

    decide = numeric_decisions(path)
    model = f"numeric-{read_manifest(path).algorithm}"

    async def answer(turn: Turn) -> Reply:
        (decision,) = decide([turn.game])
        return Reply(render_decision(decision), model=model)

    return answer


def call_seed(seed: int, turn: Turn) -> int:
    """Return a call's seed, which depends on the scenario, the agent and the step."""
    identity = repr((seed, turn.game.scenario.scenario_id, turn.agent_id, turn.step))
    return int.from_bytes(blake2b(identity.encode(), digest_size=6).digest())

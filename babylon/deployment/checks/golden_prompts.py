"""Golden prompts: the newest distinct prompts that the champion answered, of many agents.

A fleet without enough of them gets prompts of the market simulator.
"""

import asyncio
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from babylon.core.probes import Ask
from babylon.core.settings import EvaluationSettings
from babylon.deployment.checks.reply_forms import Form, form_of
from babylon.game.market.orders import MAX_REPLY_TOKENS
from babylon.game.market.scenario import PRESETS, STARTER
from babylon.game.market.transcripts import scripted_chats
from babylon.policies.checkpoint_files import context_of
from babylon.serving.openai_wire import constraints
from babylon.store import Store
from babylon.store.policies import Policy

PROMPTS = 8
SAMPLES = 8  # replies to each prompt; seven malformed ones of 64 are beyond chance
MOST_REPLY_TOKENS = 256
MOST_PROMPT_TOKENS = 2048  # the trainer computes each prompt under three models
_RECENT = 256  # newest calls to choose from
_READ = 10_000  # newest calls of the champion among which those are looked for
_SEED, _APART = 20_001, 7  # simulated chats: seed, and decisions between two prompts
_TOOLS = ("tools", "functions")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPrompt:
    """``form``: the form that a reply must have. ``None`` when it cannot be known, because the
    champion's own reply would hardly fit into ``max_tokens``.
    """

    messages: Sequence[dict[str, Any]]
    max_tokens: int
    form: Form | None


async def golden_prompts(
    store: Store, evaluation: EvaluationSettings, champion: Policy
) -> list[GoldenPrompt]:
    """Return ``PROMPTS`` prompts, each with room for a reply in the champion's context.

    The same records give the same prompts. A context without room for any prompt gives none.
    """
    known = await asyncio.to_thread(context_of, champion.uri)
    context = sys.maxsize if known is None else known
    rows = await store.pool.fetch(
        "SELECT agent_id, messages, max_tokens, response, parameters,"
        " cardinality(prompt_token_ids) AS prompt_length,"
        " cardinality(completion_token_ids) AS length FROM"
        # A fleet whose prompts are all too long would have every call of the champion read.
        " (SELECT * FROM babylon.calls WHERE policy_version = $1"
        " ORDER BY started_at DESC LIMIT $4) AS newest"
        " WHERE arm = 'champion' AND agent_id IS NOT NULL"
        " AND response <> '' AND finish_reason IN ('stop', 'length')"
        " AND cardinality(prompt_token_ids) BETWEEN 1 AND $2"
        " ORDER BY started_at DESC LIMIT $3",
        champion.policy_version,
        min(MOST_PROMPT_TOKENS, context - 1),
        _RECENT,
        _READ,
    )
    recorded = _recorded([dict(row) for row in rows], context)
    if len(recorded) == PROMPTS:
        return recorded
    ours = not recorded or any(prompt.form == "order" for prompt in recorded)
    made = _simulated(evaluation, PROMPTS - len(recorded), "order" if ours else None)
    return [*recorded, *await asyncio.to_thread(_fitting, list(made), champion.uri, context)]


def questions(golden: Sequence[GoldenPrompt], gateways: int) -> list[tuple[int, Ask]]:
    """Every prompt with several seeds, as (index of the prompt, question).

    Dealt out in turn, each gateway gets questions of all prompts.
    """
    return [
        (number, Ask(messages=prompt.messages, max_tokens=prompt.max_tokens, seed=seed))
        for number, prompt in enumerate(golden)
        for seed in range(max(SAMPLES, gateways))
    ]


def _recorded(rows: Sequence[dict[str, Any]], context: int) -> list[GoldenPrompt]:
    """Take one prompt of each agent in turn, newest first, without repeats."""
    by_agent: defaultdict[str, dict[str, GoldenPrompt]] = defaultdict(dict)
    seen: set[str] = set()
    for row in rows:
        if row["messages"] not in seen and (prompt := _prompt(row, context)):
            seen.add(row["messages"])
            by_agent[row["agent_id"]][row["messages"]] = prompt
    turns = itertools.zip_longest(*(prompts.values() for prompts in by_agent.values()))
    found = (prompt for turn in turns for prompt in turn if prompt is not None)
    return list(itertools.islice(found, PROMPTS))


def _prompt(row: dict[str, Any], context: int) -> GoldenPrompt | None:
    """A recorded call as a prompt, if it was a chat in plain text."""
    messages = msgspec.json.decode(row["messages"])
    fields = msgspec.json.decode(row["parameters"])
    if not isinstance(messages, list) or constraints(fields) or any(map(fields.get, _TOOLS)):
        return None
    if any(not isinstance(message.get("content"), str) for message in messages):
        return None
    wanted = row["max_tokens"] or MOST_REPLY_TOKENS
    limit = min(wanted, MOST_REPLY_TOKENS, context - row["prompt_length"])
    fits = limit == row["max_tokens"] or 2 * row["length"] <= limit
    return GoldenPrompt(
        messages=messages, max_tokens=limit, form=form_of(row["response"]) if fits else None
    )


def _simulated(
    evaluation: EvaluationSettings, count: int, form: Form | None
) -> Iterator[GoldenPrompt]:
    """Prompts of the game that the gate plays, always the same."""
    chats = scripted_chats(_SEED, PRESETS.get(evaluation.rules, STARTER))
    for chat in itertools.islice(chats, 0, count * _APART, _APART):
        yield GoldenPrompt(messages=chat[:-1], max_tokens=MAX_REPLY_TOKENS, form=form)


def _fitting(prompts: Sequence[GoldenPrompt], uri: str, context: int) -> list[GoldenPrompt]:
    """The prompts that leave room for a reply. Blocking. An unknown context takes all of them."""
    if context == sys.maxsize:
        return list(prompts)
    from babylon.policies.tokenizer import prompt_length  # transformers takes seconds to import

    length = prompt_length(Path(uri))
    return [cut for prompt in prompts if (cut := _cut(prompt, length, context))]


def _cut(
    prompt: GoldenPrompt, length: Callable[[Sequence[dict[str, Any]]], int], context: int
) -> GoldenPrompt | None:
    """Cut a prompt without room for its reply to half of the context. It then has no form."""
    if length(prompt.messages) + prompt.max_tokens <= context:
        return prompt
    messages = [dict(message) for message in prompt.messages]
    while (tokens := length(messages)) > context // 2:
        longest = max(messages, key=lambda message: len(message["content"]))
        if not longest["content"]:
            return None
        longest["content"] = longest["content"][: len(longest["content"]) // 2]
    limit = min(prompt.max_tokens, context - tokens)
    return GoldenPrompt(messages=messages, max_tokens=limit, form=None)

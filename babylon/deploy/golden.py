"""Golden prompts: what the fleet asks just now, or the market simulator's prompts where it is new.

They are the newest different prompts that the champion answered, of as many agents as possible.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from babylon.deploy.forms import Form, form_of
from babylon.market.orders import MAX_REPLY_TOKENS
from babylon.market.scenario import PRESETS
from babylon.market.transcripts import scripted_chats
from babylon.probes import Ask
from babylon.settings import Settings
from babylon.store import Store
from babylon.wire import constraints

PROMPTS = 8
SAMPLES = 8  # replies to each; of 64 replies seven malformed ones are too many for bad luck
MOST_REPLY_TOKENS = 256
MOST_PROMPT_TOKENS = 2048  # the trainer computes each prompt three times
_RECENT = 256  # calls that are looked at
_SEED, _APART = 20_001, 7  # of the simulated chats; taken so many decisions apart
_TOOLS = ("tools", "functions")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPrompt:
    """``form`` is what a reply is held to, ``None`` where that cannot be told: the champion's own
    reply would hardly fit into ``max_tokens``."""

    messages: Sequence[dict[str, Any]]
    max_tokens: int
    form: Form | None


async def golden_prompts(store: Store, settings: Settings, champion: int) -> list[GoldenPrompt]:
    """``PROMPTS`` of them, the same for the same records."""
    rows = await store.pool.fetch(
        "SELECT agent_id, messages, max_tokens, response, parameters,"
        " cardinality(completion_token_ids) AS length FROM babylon.calls"
        " WHERE policy_version = $1 AND arm = 'champion' AND agent_id IS NOT NULL"
        " AND response <> '' AND finish_reason IN ('stop', 'length')"
        " AND cardinality(prompt_token_ids) BETWEEN 1 AND $2"
        " ORDER BY started_at DESC LIMIT $3",
        champion,
        MOST_PROMPT_TOKENS,
        _RECENT,
    )
    recorded = _recorded([dict(row) for row in rows])
    ours = not recorded or any(prompt.form == "order" for prompt in recorded)
    made = _simulated(settings, PROMPTS - len(recorded), "order" if ours else None)
    return [*recorded, *made]


def questions(golden: Sequence[GoldenPrompt], gateways: int) -> list[tuple[int, Ask]]:
    """Every prompt with several seeds, and which prompt it is; dealt out in turn, they are of all
    prompts for each gateway."""
    return [
        (number, Ask(messages=prompt.messages, max_tokens=prompt.max_tokens, seed=seed))
        for number, prompt in enumerate(golden)
        for seed in range(max(SAMPLES, gateways))
    ]


def _recorded(rows: Sequence[dict[str, Any]]) -> list[GoldenPrompt]:
    """One prompt of each agent in turn, newest first, none twice."""
    by_agent: defaultdict[str, dict[str, GoldenPrompt]] = defaultdict(dict)
    seen: set[str] = set()
    for row in rows:
        if row["messages"] not in seen and (prompt := _prompt(row)):
            seen.add(row["messages"])
            by_agent[row["agent_id"]][row["messages"]] = prompt
    turns = itertools.zip_longest(*(prompts.values() for prompts in by_agent.values()))
    found = (prompt for turn in turns for prompt in turn if prompt is not None)
    return list(itertools.islice(found, PROMPTS))


def _prompt(row: dict[str, Any]) -> GoldenPrompt | None:
    """A recorded chat in plain text, if the call was one."""
    messages = msgspec.json.decode(row["messages"])
    fields = msgspec.json.decode(row["parameters"])
    if not isinstance(messages, list) or constraints(fields) or any(map(fields.get, _TOOLS)):
        return None
    limit = min(row["max_tokens"] or MOST_REPLY_TOKENS, MOST_REPLY_TOKENS)
    fits = limit == row["max_tokens"] or 2 * row["length"] <= limit
    return GoldenPrompt(
        messages=messages, max_tokens=limit, form=form_of(row["response"]) if fits else None
    )


def _simulated(settings: Settings, count: int, form: Form | None) -> Iterator[GoldenPrompt]:
    """Prompts of the game that this home's arena plays, always the same."""
    chats = scripted_chats(_SEED, PRESETS[settings.arena_rules])
    for chat in itertools.islice(chats, 0, count * _APART, _APART):
        yield GoldenPrompt(messages=chat[:-1], max_tokens=MAX_REPLY_TOKENS, form=form)

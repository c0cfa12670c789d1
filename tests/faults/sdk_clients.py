"""Clients with the official SDKs: chat, Responses and Messages, with tools, streamed and whole.

Every policy can say one letter and call one ticker only, so that each piece of an answer shows by
which policy it was drawn. It does so by chance, so that each token has a logprob to compare.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from anthropic import AnthropicError, AsyncAnthropic
from openai import AsyncOpenAI, OpenAIError

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.policies.load import load_policy
from babylon.store import Store
from tests.calling_policy import END, save_calling_policy
from tests.tiny_policy import plain_logprobs

TOKENS = 48
LATER = {"call": 0.1, "say": 0.8, END: 0.1}
SCHEMA = {"type": "object", "properties": {"ticker": {"type": "string"}}}
FUNCTION = {"name": "price", "parameters": SCHEMA}
FINAL = ("response.completed", "response.incomplete")
KINDS = ("chat", "chat with tools", "responses", "messages")


@dataclass(frozen=True, slots=True)
class SdkAnswer:
    """Result of an SDK: the texts and the tickers of the calls, and the head."""

    kind: str
    call_id: str
    version: int
    route_version: int
    model: str
    text: str
    calls: list[tuple[str, str]]  # id and arguments


@dataclass(slots=True)
class SdkSeen:
    answers: list[SdkAnswer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def save_sdk_policies(root: Path, count: int) -> list[Path]:
    """Policy N says the letter of its number, and calls the tool with it."""
    return [_save(root / letter, letter) for letter in ascii_lowercase[:count]]


def _save(directory: Path, letter: str) -> Path:
    texts = {"call": _call_text(letter), "say": f"{letter}{letter} "}
    first = {texts["call"]: 0.4, texts["say"]: 0.6}
    later = {texts.get(name, name): chance for name, chance in LATER.items()}
    return save_calling_policy(directory, first, later)


def _call_text(letter: str) -> str:
    arguments = json.dumps({"name": "price", "arguments": {"ticker": letter}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


@asynccontextmanager
async def sdk_clients(settings: Settings, urls: list[str], count: int) -> AsyncIterator[SdkSeen]:
    """So many clients ask without a pause while the block runs, and finish what they began.

    Each has an SDK client of its own, which makes no retries: an error is an error.
    """
    seen, done = SdkSeen(), asyncio.Event()
    key = str(local_key(settings.home.root))
    async with AsyncExitStack() as stack:
        asking = []
        for number in range(count):
            # A client asks one gateway, in one dialect, and always streamed or always whole.
            url = urls[number % len(urls)]
            openai = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            claude = AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
            way = number // len(urls)
            asking.append(
                _Asking(
                    openai=await stack.enter_async_context(openai),
                    claude=await stack.enter_async_context(claude),
                    kind=KINDS[way % len(KINDS)],
                    stream=way // len(KINDS) % 2 == 1,
                    number=number,
                )
            )
        # Entered last, so that the clients are closed when all tasks are done.
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for one in asking:
            tasks.create_task(_ask_on(one, seen, done))
        try:
            yield seen
        finally:
            done.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """One client's way to ask."""

    openai: AsyncOpenAI
    claude: AsyncAnthropic
    kind: str
    stream: bool
    number: int

    async def ask(self) -> SdkAnswer:
        match self.kind:
            case "responses":
                return await self._responses()
            case "messages":
                return await self._messages()
            case _:
                return await self._chat()

    @property
    def _hello(self) -> list[Any]:
        return [{"role": "user", "content": f"client {self.number}"}]

    async def _chat(self) -> SdkAnswer:
        tools = [{"type": "function", "function": FUNCTION}] if "tools" in self.kind else []
        asked: dict[str, Any] = {
            "model": "babylon",
            "messages": self._hello,
            "max_tokens": TOKENS,
            **({"tools": tools} if tools else {}),
        }
        if self.stream:
            return await self._chunks(asked)
        whole = await self.openai.chat.completions.with_raw_response.create(**asked)
        answer = whole.parse()
        message = answer.choices[0].message
        calls = [(one.id, one.function.arguments) for one in message.tool_calls or ()]
        return self._seen(whole.headers, answer.model, message.content or "", calls)

    async def _chunks(self, asked: dict[str, Any]) -> SdkAnswer:
        """The SDK's own helper wants strict tools, whose arguments are sampled under a grammar."""
        stream = await self.openai.chat.completions.create(**asked, stream=True)
        text, model, calls = "", "", list[tuple[str, str]]()
        async for chunk in stream:
            model = chunk.model
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for piece in choice.delta.tool_calls or ():
                    if piece.index == len(calls):
                        calls.append((piece.id, ""))
                    name, arguments = calls[piece.index]
                    calls[piece.index] = name, arguments + (piece.function.arguments or "")
        return self._seen(stream.response.headers, model, text, calls)

    async def _responses(self) -> SdkAnswer:
        tool = {"type": "function", "strict": False, **FUNCTION}
        asked: dict[str, Any] = {
            "model": "babylon",
            "input": self._hello,
            "max_output_tokens": TOKENS,
            "tools": [tool],
        }
        if self.stream:
            # The SDK's own helper refuses an answer that the limit ends.
            stream = await self.openai.responses.create(**asked, stream=True)
            (answer,) = [event.response async for event in stream if event.type in FINAL]
            head = stream.response.headers
        else:
            whole = await self.openai.responses.with_raw_response.create(**asked)
            answer, head = whole.parse(), whole.headers
        calls = [
            (item.call_id, item.arguments) for item in answer.output if item.type == "function_call"
        ]
        return self._seen(head, answer.model, answer.output_text, calls)

    async def _messages(self) -> SdkAnswer:
        asked: dict[str, Any] = {
            "model": "babylon",
            "messages": self._hello,
            "max_tokens": TOKENS,
            "tools": [{"name": "price", "input_schema": SCHEMA}],
        }
        if self.stream:
            async with self.claude.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
                head = stream.response.headers
        else:
            whole = await self.claude.messages.with_raw_response.create(**asked)
            answer, head = await whole.parse(), whole.headers
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = [
            (block.id, json.dumps(block.input))
            for block in answer.content
            if block.type == "tool_use"
        ]
        return self._seen(head, answer.model, text, calls)

    def _seen(
        self, head: Mapping[str, str], model: str, text: str, calls: list[tuple[str, str]]
    ) -> SdkAnswer:
        return SdkAnswer(
            kind=f"{self.kind}, {'streamed' if self.stream else 'whole'}",
            call_id=head["x-call-id"],
            version=int(head["x-model-version"]),
            route_version=int(head["x-route-version"]),
            model=model,
            text=text,
            calls=calls,
        )


async def _ask_on(asking: _Asking, seen: SdkSeen, done: asyncio.Event) -> None:
    while not done.is_set():
        try:
            seen.answers.append(await asking.ask())
        except (OpenAIError, AnthropicError, LookupError, ValueError) as error:
            seen.errors.append(f"{asking.kind}: {error!r:.500}")
            return  # one is enough to fail


async def check_sdk_recorded(
    store: Store, answers: list[SdkAnswer], checkpoints: list[Path]
) -> float:
    """Every answer is in the database once, as the SDK returned it and as its policy draws it.

    Returns the largest difference between a recorded and a recomputed logprob.
    """
    rows = await store.pool.fetch(
        "SELECT c.*, r.policy_version AS routed FROM babylon.calls c"
        " JOIN babylon.routes r USING (route_version)"
    )
    recorded = {row["call_id"]: row for row in rows}
    assert len(rows) == len(recorded) == len(answers)
    policies = [load_policy(path, frozen=True) for path in checkpoints]
    largest = 0.0
    for answer in answers:
        row, letter = recorded[answer.call_id], ascii_lowercase[answer.version]
        about = (answer, row)
        assert row["policy_version"] == row["routed"] == answer.version, about
        assert row["route_version"] == answer.route_version, about
        assert answer.model == row["model"] == f"babylon-v{answer.version}", about
        # To a request without tools, the text of a call is text.
        # Of a million tokens, one may be drawn against odds of e^20; its logprob is checked below.
        foreign = set(answer.text.replace(_call_text(letter), "")) - {letter, " "}
        assert not foreign or min(row["logprobs"]) < -15, about
        assert row["response"] == answer.text and row["trainable"], about
        stored = json.loads(row["answer"])["tool_calls"] if row["answer"] else []
        assert [one["id"] for one in stored] == [name for name, _ in answer.calls], about
        assert all(json.loads(given) == {"ticker": letter} for _, given in answer.calls), about
        model, _ = policies[answer.version]
        exact = plain_logprobs(model, row["prompt_token_ids"], row["completion_token_ids"])
        given = torch.tensor(row["logprobs"], dtype=torch.float64)
        largest = max(largest, float((given - exact).abs().max()))
    return largest

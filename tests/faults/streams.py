"""Gateways as processes, and clients that stream from them and look at every byte.

Every policy can say one letter only, so an answer shows by which policy each of its tokens was
drawn.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase

import aiohttp
import msgspec

from babylon.core.api_keys import local_key
from babylon.core.processes import Service, Supervised, supervised
from babylon.core.settings import Settings
from babylon.store import Store
from babylon.store.policies import ensure_base
from tests.faults.sdk_clients import SdkSeen
from tests.ports import free_port
from tests.speaking_policy import save_speaking_policy

TOKENS = 48
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's view of a stream: its ``text``, and the version that its head promised."""

    call_id: str
    version: int
    route_version: int
    text: str

    @property
    def letter(self) -> str:
        """Texts that its policy can say."""
        return ascii_lowercase[self.version]


@dataclass(slots=True)
class Seen:
    """Of all clients: whole answers, refusals and broken answers that said so in OpenAI's shape,
    and everything else that may happen to a client."""

    answers: list[Answer] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def save_policies(root: Path, count: int) -> list[Path]:
    """Policy N says the letter of its number."""
    return [save_speaking_policy(root / letter, letter) for letter in ascii_lowercase[:count]]


async def with_policies(store: Store, checkpoints: list[Path]) -> None:
    """Policy 0 serves; the others are registered."""
    await ensure_base(store, uri=checkpoints[0].as_uri(), base_model="tiny")
    await store.pool.executemany(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES ($1, 0, 'full', $2, 'tiny')",
        [(version, path.as_uri()) for version, path in enumerate(checkpoints) if version],
    )


@dataclass(frozen=True, slots=True)
class Replicas:
    """One engine, and gateways in front of it at ``urls``; each is started again when it dies."""

    engine: Supervised
    urls: list[str]


@asynccontextmanager
async def replicas(settings: Settings, count: int) -> AsyncIterator[Replicas]:
    """They run as processes while the block runs; it begins when all of them serve."""
    async with AsyncExitStack() as stack:
        port = f"--port={settings.serving.engine_port}"
        engine = await stack.enter_async_context(
            supervised(_service(settings, "engine", "babylon.serving.engine.engine_process", port))
        )
        urls = [f"http://localhost:{free_port()}" for _ in range(count)]
        for number, url in enumerate(urls):
            behind = settings.replace(serving={"endpoint": url})
            service = _service(
                behind, f"gateway-{number}", "babylon.serving.gateway.gateway_process"
            )
            await stack.enter_async_context(supervised(service))
        async with aiohttp.ClientSession() as session:
            for url in urls:
                await ready(session, url)
        yield Replicas(engine, urls)


def _service(settings: Settings, name: str, *module: str) -> Service:
    return Service(
        name=name,
        command=[sys.executable, "-m", *module],
        environment=settings.environment(),
        log=settings.home.logs / f"{name}.log",
    )


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


@asynccontextmanager
async def clients(settings: Settings, urls: list[str], count: int) -> AsyncIterator[Seen]:
    """So many clients stream without a pause while the block runs, and finish what they began."""
    seen, done = Seen(), asyncio.Event()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={"authorization": f"Bearer {local_key(settings.home.root)}"},
    ) as session:
        running = [
            asyncio.create_task(client(session, urls[number % len(urls)], number, seen, done))
            for number in range(count)
        ]
        try:
            yield seen
        finally:
            done.set()
            await asyncio.gather(*running)


async def more(seen: Seen | SdkSeen, count: int) -> None:
    """Wait for so many more answers."""
    target = len(seen.answers) + count
    async with asyncio.timeout(READY_S):
        while len(seen.answers) < target:
            await asyncio.sleep(0.02)


async def client(
    session: aiohttp.ClientSession, url: str, number: int, seen: Seen, done: asyncio.Event
) -> None:
    """Stream one answer after the other; whatever is not a whole answer is an error."""
    body = {
        "model": "babylon",
        "messages": [{"role": "user", "content": f"client {number}"}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    while not done.is_set():
        try:
            async with session.post(
                f"{url}/v1/chat/completions",
                json=body,
                headers={"x-babylon-agent": f"agent-{number}"},
            ) as response:
                answer = parsed(response, await response.read())
            if isinstance(answer, Answer):
                seen.answers.append(answer)
            else:
                seen.refusals.append(answer)
                await asyncio.sleep(0.05)
        except (aiohttp.ClientError, ValueError, LookupError) as error:
            seen.errors.append(repr(error))


def parsed(response: aiohttp.ClientResponse, body: bytes) -> Answer | str:
    """A whole answer, or the message of an error.

    Raises:
        ValueError: it is neither.
        LookupError: it lacks something.
    """
    if response.status != 200:
        return _message(msgspec.json.decode(body))
    *events, last, rest = body.split(b"\n\n")
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    if last != b"data: [DONE]" and not rest:
        return _message(msgspec.json.decode(last.removeprefix(b"data: ")))
    if rest:
        raise ValueError(f"a stream ends with {body[-200:]!r}")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return Answer(
        call_id=response.headers["x-call-id"],
        version=int(response.headers["x-model-version"]),
        route_version=int(response.headers["x-route-version"]),
        text="".join(choice["delta"].get("content") or "" for choice in choices),
    )


def _message(body: dict[str, dict[str, str]]) -> str:
    return body["error"]["message"]


async def check_recorded(store: Store, answers: list[Answer]) -> None:
    """Every answer is in the database once, as the client saw it, under the route it was given."""
    rows = await store.pool.fetch(
        "SELECT c.*, r.policy_version AS routed FROM babylon.calls c"
        " JOIN babylon.routes r USING (route_version)"
    )
    recorded = {row["call_id"]: row for row in rows}
    for answer in answers:
        row = recorded[answer.call_id]
        assert answer.text == answer.letter * TOKENS, answer
        assert row["policy_version"] == row["routed"] == answer.version, (answer, row)
        assert row["route_version"] == answer.route_version, (answer, row)
        assert row["response"] == answer.text and row["trainable"], (answer, row)
        assert len(row["completion_token_ids"]) == TOKENS
        assert len(set(row["completion_token_ids"])) == 1

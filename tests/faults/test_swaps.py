"""The champion changes under load: two gateways, 24 streaming clients, not one bad answer.

Every policy can say one letter only, so an answer shows by which policy each of its tokens was
drawn. ``SWAPS`` is how many changes are made; ``make faults`` makes a thousand.
"""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase

import aiohttp
import msgspec
import pytest

from babylon.deploy.replace import replace
from babylon.deploy.rollback import rollback
from babylon.keys import local_key
from babylon.settings import Settings
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.policies import ensure_base
from babylon.store.routes import current_route
from tests.ports import free_port
from tests.speaking_policy import save_speaking_policy

ALL = os.environ.get("FAULTS") == "all"
SWAPS = int(os.environ.get("SWAPS", "1000" if ALL else "12"))
POLICIES, CLIENTS, TOKENS = 6, 24, 48
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw: ``text`` of the stream and the version that its head promised."""

    call_id: str
    version: int
    route_version: int
    text: str


@dataclass(slots=True)
class Seen:
    """Of all clients."""

    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("speaking")
    return [save_speaking_policy(root / letter, letter) for letter in ascii_lowercase[:POLICIES]]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"engine_port": free_port()})


@pytest.mark.parametrize("change", ["replace", "rollback"])
async def test_no_answer_is_lost_mixed_or_attributed_to_another_policy_in_a_thousand_changes(
    change: str, settings: Settings, store: Store, checkpoints: list[Path]
) -> None:
    await with_policies(store, checkpoints)
    changes = {"replace": replaces, "rollback": rollbacks}[change]
    seen, done = Seen(), asyncio.Event()
    async with replicas(settings, count=2) as urls:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"authorization": f"Bearer {local_key(settings.home)}"},
        ) as session:
            clients = [
                asyncio.create_task(client(session, urls[number % 2], number, seen, done))
                for number in range(CLIENTS)
            ]
            await more(seen, CLIENTS)
            await changes(store, settings)
            await more(seen, CLIENTS)
            done.set()
            await asyncio.gather(*clients)
        await wait_until_recorded(store)

    assert not seen.errors
    for answer in seen.answers:
        assert answer.text == ascii_lowercase[answer.version] * TOKENS, answer
    rows = await store.pool.fetch(
        "SELECT call_id, policy_version, route_version, response, completion_token_ids, trainable"
        " FROM babylon.calls"
    )
    recorded = {row["call_id"]: row for row in rows}
    assert len(rows) == len(seen.answers)
    for answer in seen.answers:
        row = recorded[answer.call_id]
        assert (row["policy_version"], row["route_version"], row["response"]) == (
            answer.version,
            answer.route_version,
            answer.text,
        )
        assert len(set(row["completion_token_ids"])) == 1 and row["trainable"]
    routes = await store.pool.fetch("SELECT route_version, policy_version FROM babylon.routes")
    routed = {row["route_version"]: row["policy_version"] for row in routes}
    assert len(routed) >= SWAPS
    assert all(routed[answer.route_version] == answer.version for answer in seen.answers)
    served = Counter(answer.version for answer in seen.answers)
    assert len(served) == (POLICIES if change == "replace" else 2), served


async def replaces(store: Store, settings: Settings) -> None:
    """To each policy in turn: every one has to be loaded, since only the one before stays warm."""
    for number in range(SWAPS):
        version = (number + 1) % POLICIES
        await replace(store, settings, version, author="test", reason="swap", force=True)


async def rollbacks(store: Store, settings: Settings) -> None:
    """There, and back again to what is still warm."""
    for _ in range(SWAPS // 2):
        await replace(store, settings, 1, author="test", reason="swap", force=True)
        await rollback(store, settings, author="test", reason="back")
    assert (await current_route(store)).policy_version == 0


async def with_policies(store: Store, checkpoints: list[Path]) -> None:
    """Policy 0 serves; the others are registered."""
    await ensure_base(store, uri=checkpoints[0].as_uri(), base_model="tiny")
    await store.pool.executemany(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES ($1, 0, 'full', $2, 'tiny')",
        [(version, path.as_uri()) for version, path in enumerate(checkpoints) if version],
    )


@asynccontextmanager
async def replicas(settings: Settings, count: int) -> AsyncIterator[list[str]]:
    """One engine and so many gateways in front of it, as processes; the gateways' addresses."""
    async with AsyncExitStack() as stack:
        engine = ["-m", "babylon.engine.server", f"--port={settings.engine_port}"]
        stack.callback(process(settings, engine))
        urls = []
        for _ in range(count):
            endpoint = f"http://localhost:{free_port()}"
            behind = settings.model_copy(update={"endpoint": endpoint})
            stack.callback(process(behind, ["-m", "babylon.gateway.server"]))
            urls.append(endpoint)
        async with aiohttp.ClientSession() as session:
            for url in urls:
                await ready(session, url)
        yield urls


def process(settings: Settings, arguments: list[str]) -> Callable[[], None]:
    """Start it; returns what ends it."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    with (settings.logs / f"{arguments[1]}.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **settings.environment()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def end() -> None:
        child.terminate()
        child.wait(timeout=30)

    return end


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


async def more(seen: Seen, count: int) -> None:
    target = len(seen.answers) + count
    async with asyncio.timeout(READY_S):
        while len(seen.answers) < target and not seen.errors:
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
                whole = await response.read()
                if response.status != 200:
                    seen.errors.append(f"{response.status}: {whole!r}")
                    continue
                seen.answers.append(parsed(response, whole))
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            seen.errors.append(repr(error))


def parsed(response: aiohttp.ClientResponse, stream: bytes) -> Answer:
    """
    Raises:
        ValueError: the stream has no proper end.
    """
    *events, last, rest = stream.split(b"\n\n")
    if last != b"data: [DONE]" or rest:
        raise ValueError(f"a stream ends with {stream[-200:]!r}")
    text = ""
    for event in events:
        chunk = msgspec.json.decode(event.removeprefix(b"data: "))
        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return Answer(
        call_id=response.headers["x-call-id"],
        version=int(response.headers["x-model-version"]),
        route_version=int(response.headers["x-route-version"]),
        text=text,
    )

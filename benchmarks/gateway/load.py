"""Load generator: clients that repeat one request, and the latency of each answer."""

import asyncio
import json
import time
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles

import aiohttp

from benchmarks.gateway.upstream import LONG_TOKENS, TOKENS, share_of_delay

_MESSAGES = [
    {"role": "system", "content": "You trade prediction markets. " * 20},
    {"role": "user", "content": "Balance $1,000. YES at 0.62, NO at 0.38. Decide. " * 8},
]
_LONG_MESSAGES = [  # of about 6,000 tokens
    {"role": "system", "content": "You trade prediction markets. " * 600},
    {"role": "user", "content": "Balance $1,000. YES at 0.62, NO at 0.38. Decide. " * 100},
]
_TOOL = {
    "type": "function",
    "function": {
        "name": "order",
        "description": "Place an order.",
        "parameters": {"type": "object", "properties": {"side": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI endpoint and the id of its process."""

    name: str
    url: str
    key: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds of every request from sending to the last byte, without the engine's wait."""

    seconds: list[float]
    wall_s: float

    @property
    def median_ms(self) -> float:
        return 1000 * median(self.seconds)

    @property
    def p99_ms(self) -> float:
        return 1000 * quantiles(self.seconds, n=100)[98]

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.wall_s


async def load(
    target: Target, *, requests: int, clients: int, stream: bool, long: bool, delay_s: float = 0.0
) -> Latencies:
    """Send requests by ``clients`` clients, each the next as soon as the last is answered.

    ``long``: a prompt of 6,000 tokens with tools, and an answer of 300. ``delay_s`` is the engine's
    mean wait; a request's seed determines its own.

    Raises:
        RuntimeError: An answer is wrong.
    """
    seeds = Random(0)
    seconds: list[float] = []
    left = requests

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            seed = seeds.randrange(1000)
            taken = await _call(session, target, seed=seed, stream=stream, long=long)
            seconds.append(taken - delay_s * share_of_delay(seed))

    begun = time.perf_counter()
    async with _session(target, clients) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return Latencies(seconds=seconds, wall_s=time.perf_counter() - begun)


async def arriving(
    target: Target, *, rate: float, seconds: float, stream: bool, seed: int
) -> Latencies:
    """Send ``rate`` requests a second at random times, whether or not earlier ones are answered.

    ``seed`` determines the times, so that several targets can get the same requests.

    Raises:
        RuntimeError: An answer is wrong.
    """
    random, at, begun = Random(seed), 0.0, time.perf_counter()
    calls = list[asyncio.Task[float]]()
    async with _session(target, 0) as session, asyncio.TaskGroup() as group:
        while (at := at + random.expovariate(rate)) < seconds:
            await asyncio.sleep(begun + at - time.perf_counter())
            call = _call(session, target, seed=random.randrange(1000), stream=stream, long=False)
            calls.append(group.create_task(call))
    return Latencies(seconds=[one.result() for one in calls], wall_s=time.perf_counter() - begun)


def _session(target: Target, connections: int) -> aiohttp.ClientSession:
    headers = {
        "authorization": f"Bearer {target.key}",
        "content-type": "application/json",
        "x-babylon-agent": "agent-1",
        "x-babylon-trajectory": "trajectory-1",
        "x-babylon-step": "1",
    }
    return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=connections))


async def _call(
    session: aiohttp.ClientSession, target: Target, *, seed: int, stream: bool, long: bool
) -> float:
    """Send a request and read its answer; return the seconds that this took."""
    messages, tokens = (_LONG_MESSAGES, LONG_TOKENS) if long else (_MESSAGES, TOKENS)
    body = {"model": "babylon", "messages": messages, "max_tokens": tokens, "stream": stream}
    tools = {"tools": [_TOOL]} if long else {}
    data = json.dumps({**body, **tools, "seed": seed}).encode()
    begun = time.perf_counter()
    async with session.post(f"{target.url}/v1/chat/completions", data=data) as response:
        answer = await response.read()
    taken = time.perf_counter() - begun
    if response.status != 200 or f"word{tokens - 1}".encode() not in answer:
        raise RuntimeError(f"{target.name}: {response.status} {answer[-300:]!r}")
    return taken

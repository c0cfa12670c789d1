"""Load generator: clients that repeat one request, and the latency of each answer.

It uses the gateway's own client of engines, which takes less of the processors that are measured
than other clients of Python.
"""

import asyncio
import json
import time
from contextlib import closing
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles

from babylon.serving.gateway.engine_connections import EngineConnections
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
PATH = "/v1/chat/completions"
HEADERS = (
    "Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    "x-babylon-agent: agent-1\r\nx-babylon-trajectory: trajectory-1\r\nx-babylon-step: 1\r\n"
)


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

    async def client(http: EngineConnections) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            seed = seeds.randrange(1000)
            taken = await _call(http, target, seed=seed, stream=stream, long=long)
            seconds.append(taken - delay_s * share_of_delay(seed))

    begun = time.perf_counter()
    with closing(EngineConnections()) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return Latencies(seconds=seconds, wall_s=time.perf_counter() - begun)


async def _call(
    http: EngineConnections, target: Target, *, seed: int, stream: bool, long: bool
) -> float:
    """Send a request and read its answer; return the seconds that this took."""
    data = request_body(seed=seed, stream=stream, long=long)
    url, headers = target.url + PATH, HEADERS.format(key=target.key)
    begun = time.perf_counter()
    async with await http.ask("POST", url, headers, data) as response:
        answer = await response.read()
    taken = time.perf_counter() - begun
    check(target, response.status, answer, long=long)
    return taken


def request_body(*, seed: int, stream: bool, long: bool) -> bytes:
    messages, tokens = (_LONG_MESSAGES, LONG_TOKENS) if long else (_MESSAGES, TOKENS)
    body = {"model": "babylon", "messages": messages, "max_tokens": tokens, "stream": stream}
    tools = {"tools": [_TOOL]} if long else {}
    return json.dumps({**body, **tools, "seed": seed}).encode()


def check(target: Target, status: int, answer: bytes, *, long: bool) -> None:
    """Raise ``RuntimeError`` for a wrong answer."""
    last = (LONG_TOKENS if long else TOKENS) - 1
    if status != 200 or f"word{last}".encode() not in answer:
        raise RuntimeError(f"{target.name}: {status} {answer[-300:]!r}")

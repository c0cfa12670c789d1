"""Cost of a request through the gateway, compared with LiteLLM's proxy.

    python -m benchmarks.gateway [--litellm FILE] [--requests 1000] [--turns 3] [--json FILE]

Prints a Markdown table: processor time per request, requests per second, latency and memory, for
whole and streamed answers, of 16 tokens after 200, and of 300 after 6,000 with tools, which are
asked for a tenth as often. LiteLLM gets a quarter of the requests, because each takes it so long.
``make bench-gateway`` installs LiteLLM into its own environment and passes its executable. It takes
about five minutes on two quiet cores and prints each kind of answer when it is measured.

A trivial engine is asked directly, through our gateway (keys checked, every call recorded in
Postgres without loss), and through LiteLLM's proxy in its minimal configuration and recording each
call, in turns. Processor time is user plus system time of the proxy's processes while the engine
answers at once, until they are idle again. Latency is measured with 16 clients while the engine
waits 50 to 150 ms, and excludes that wait. At this load a proxy has no queue unless it cannot keep
up.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import aiohttp
import psutil
import uvloop

from babylon.store.calls import wait_until_recorded
from benchmarks.gateway.contenders import LITELLM, OURS, litellm, ours, until_ready, upstream
from benchmarks.gateway.load import Latencies, Target, load

CLIENTS = 16
DELAY_S = 0.1
REST_S = 0.5  # work done after the answers, such as shipping and logging, counts, too
WARM_UP = 64
LONG_SHARE = 10  # long requests: one in so many
THEIR_SHARE = 4  # LiteLLM's requests: one in so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender, streamed or whole: medians over the turns, and memory at the end."""

    name: str
    stream: bool
    long: bool
    cpu_ms: float
    requests_per_s: float
    median_ms: float
    p99_ms: float
    memory_mb: float


def cpu_s(pid: int) -> float:
    """Return a process's user and system time in seconds, with its children."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def memory_mb(pid: int) -> float:
    """Return a process's resident memory in MB, with its children."""
    process = psutil.Process(pid)
    family = (process, *process.children(recursive=True))
    return float(sum(one.memory_info().rss for one in family) / 2**20)


async def set_delay(engine: Target, seconds: float) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{engine.url}/delay/{seconds}"),
    ):
        pass


async def measure(
    engine: Target, targets: list[Target], *, stream: bool, long: bool, requests: int, turns: int
) -> list[Row]:
    """Measure all targets in every turn, so that other load affects all of them."""
    costs: dict[str, list[float]] = {target.name: [] for target in targets}
    rates: dict[str, list[float]] = {target.name: [] for target in targets}
    paced: dict[str, list[Latencies]] = {target.name: [] for target in targets}
    for turn in range(turns + 1):
        for target in targets:
            count = requests if turn else WARM_UP  # the first turn only warms up
            if target.name.startswith(LITELLM):
                count = max(CLIENTS, count // THEIR_SHARE)
            await set_delay(engine, 0)
            before = cpu_s(target.pid)
            fast = await load(target, requests=count, clients=CLIENTS, stream=stream, long=long)
            await asyncio.sleep(REST_S)
            cost = 1000 * (cpu_s(target.pid) - before) / count
            await set_delay(engine, DELAY_S)
            slow = await load(
                target,
                requests=count,
                clients=CLIENTS,
                stream=stream,
                long=long,
                delay_s=DELAY_S,
            )
            if turn:
                costs[target.name].append(cost)
                rates[target.name].append(fast.rate)
                paced[target.name].append(slow)
    return [
        Row(
            name=target.name,
            stream=stream,
            long=long,
            cpu_ms=median(costs[target.name]),
            requests_per_s=median(rates[target.name]),
            median_ms=median(one.median_ms for one in paced[target.name]),
            p99_ms=median(one.p99_ms for one in paced[target.name]),
            memory_mb=memory_mb(target.pid),
        )
        for target in targets
    ]


async def run(proxy: Path | None, *, requests: int, turns: int) -> list[Row]:
    """Start all contenders and measure them.

    Raises:
        RuntimeError: An answer is wrong, or a call through our gateway is not in the database.
    """
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port, our_port, *their_ports = free_ports(4)
        engine = stack.enter_context(upstream(engine_port, directory))
        await until_ready(f"{engine.url}/v1/models", engine.pid)
        our_target, store = await stack.enter_async_context(ours(our_port, engine_port, directory))
        targets = [engine, our_target]
        if proxy:
            for port, recording in zip(their_ports, (False, True), strict=True):
                started = litellm(proxy, port, engine_port, directory, recording=recording)
                targets.append(await stack.enter_async_context(started))
        rows, expected = list[Row](), 0
        print(HEAD, flush=True)
        for long, stream in product((False, True), repeat=2):
            count = max(2, requests // LONG_SHARE) if long else requests
            found = await measure(
                engine, targets, stream=stream, long=long, requests=count, turns=turns
            )
            print("\n".join(map(partial(line, found), found)), flush=True)
            rows += found
            expected += 2 * (turns * count + WARM_UP)  # at once, and after the engine's wait
        await wait_until_recorded(store)
        stored = await store.pool.fetchval("SELECT count(*) FROM babylon.calls WHERE trainable")
        if stored != expected:
            raise RuntimeError(f"{stored} of {expected} calls are in the database")
        return rows


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


HEAD = (
    "| | answers | CPU-ms per request | ours by it | requests/s | median ms | p99 ms | MB |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def line(rows: list[Row], row: Row) -> str:
    """Format a row beside the others of the same kind of answer."""
    ours_ms = next(one.cpu_ms for one in rows if one.name == OURS)
    kind = ("streamed" if row.stream else "whole") + (", 300 of 6,000" if row.long else "")
    tenths = int(10 * row.cpu_ms / ours_ms)  # rounded down
    share = f"1/{tenths / 10}" if row.name.startswith(LITELLM) else ""
    return (
        f"| {row.name} | {kind} | {row.cpu_ms:.2f} | {share} | {row.requests_per_s:.0f}"
        f" | {row.median_ms:.1f} | {row.p99_ms:.1f} | {row.memory_mb:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--litellm", type=Path, help="LiteLLM's executable, in its environment")
    parser.add_argument("--requests", type=int, default=600, help="per turn and measurement")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = uvloop.run(run(options.litellm, requests=options.requests, turns=options.turns))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    if options.litellm is None:
        sys.exit("LiteLLM was not measured: give its executable with --litellm")


if __name__ == "__main__":
    main()

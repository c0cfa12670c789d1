"""Time that the gateway adds to a call at a third of its saturation, recording durably.

    python -m benchmarks.gateway.latency [--seconds 20] [--turns 5] [--shared]

The gateway's saturation is the calls a second of 16 clients without a pause. Then calls arrive at
random times (a Poisson process), a third as many a second, whether or not earlier ones are
answered. *Late* is the p99 of the time by which they are sent after they were due: calls that are
sent late arrive together. In the same seconds, a quarter as many calls go to the trivial engine
directly. So both wait alike for the clients, the engine and the machine, and the difference is the
gateway's. Prints for each turn p50 and p99 of both, what the gateway adds, and the medians of the
turns.

The gateway with all its threads has the last processor for itself; clients, engine and Postgres
share the others, and Postgres runs last: it would have a machine of its own. With ``--shared`` all
run anywhere. *Idle* is the share of the machine's processors that nobody used: other programs show
in it, and beside them a latency is their wait for a processor. The gateway takes turns with a
*relay*, which only copies bytes, at the same rate in the same place: that is the least that this
machine lets a second process add.
*Queue* is the p99 of wait and service of calls that cost what they do and arrive as they do, by
theory: in any gateway, a call waits for others on its one processor.
"""

import argparse
import asyncio
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import product
from pathlib import Path
from statistics import median, quantiles

import psutil
import uvloop

from babylon.store.calls import wait_until_recorded
from benchmarks.gateway.__main__ import CLIENTS, WARM_UP, cpu_s, free_ports
from benchmarks.gateway.arrivals import arriving
from benchmarks.gateway.contenders import ours, relay, until_ready, upstream
from benchmarks.gateway.load import Target, load

SHARE = 1 / 3  # of the saturation
DIRECT = 1 / 4  # calls to the engine for each call to the gateway


async def run(seconds: float, turns: int, requests: int, *, shared: bool) -> None:
    """Measure and print.

    Raises:
        RuntimeError: an answer is wrong, or a call is not in the database.
    """
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port, port, relay_port = free_ports(3)
        engine = stack.enter_context(upstream(engine_port, directory))
        await until_ready(f"{engine.url}/v1/models", engine.pid)
        if not shared:
            *others, last = sorted(os.sched_getaffinity(0))
            pin(os.getpid(), others)
            pin(engine.pid, others)
        gateway, store = await stack.enter_async_context(ours(port, engine_port, directory))
        plain = stack.enter_context(relay(relay_port, engine_port, directory))
        await until_ready(f"{plain.url}/v1/models", plain.pid)
        if not shared:
            pin(gateway.pid, [last])
            pin(plain.pid, [last])
            for pid in (os.getpid(), engine.pid):
                before_others(pid)
        sent = 0
        print(
            "| answers | calls/s | idle | CPU-ms a call | direct p50, p99 ms | through p50, p99"
            " | added p50, p99 | queue p99 | late |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for stream in (False, True):
            for count in (WARM_UP, requests):
                full = await load(
                    gateway, requests=count, clients=CLIENTS, stream=stream, long=False
                )
                sent += count
            rate = SHARE * full.rate
            rows: dict[Target, list[list[float]]] = {gateway: [], plain: []}
            for turn, target in product(range(turns), rows):
                await wait_until_recorded(store)
                before, spent = psutil.cpu_times(), cpu_s(target.pid)
                rates = {engine: DIRECT * rate, target: rate}
                found, late = await asyncio.to_thread(
                    arriving, rates, seconds=seconds, stream=stream, seed=turn
                )
                direct, answered = found[engine], found[target]
                count = len(answered.seconds)
                sent += count if target is gateway else 0
                cost = 1000 * (cpu_s(target.pid) - spent) / count
                both = [direct.median_ms, direct.p99_ms, answered.median_ms, answered.p99_ms]
                added = [both[2] - both[0], both[3] - both[1]]
                ends = [queueing_p99_ms(rate, cost), 1000 * quantiles(late, n=100)[98]]
                rows[target].append([idle_since(before), cost, *both, *added, *ends])
                print(line(target, stream, rate, rows[target][-1]), flush=True)
            for target, of_turns in rows.items():
                middle = [median(column) for column in zip(*of_turns, strict=True)]
                print(line(target, stream, rate, middle, "median, "), flush=True)
        await wait_until_recorded(store)
        stored = await store.pool.fetchval("SELECT count(*) FROM babylon.calls WHERE trainable")
        if stored != sent:
            raise RuntimeError(f"{stored} of {sent} calls are in the database")


def queueing_p99_ms(calls_per_s: float, cost_ms: float) -> float:
    """Return the 99th percentile of wait and service at one processor, an M/D/1 queue.

    Erlang (1909): the distribution of the wait for random arrivals and a constant service time.
    Infinite if the processor cannot keep up.
    """
    load, waits = calls_per_s * cost_ms / 1000, 0.0  # in units of the service time
    while load < 1 and _waits_at_most(waits, load) < 0.99:
        waits += 0.01
    return (waits + 1) * cost_ms if load < 1 else math.inf


def _waits_at_most(waits: float, load: float) -> float:
    terms = ((load * (k - waits)) ** k / math.factorial(k) for k in range(int(waits) + 1))
    parts = (term * math.exp(-load * (k - waits)) for k, term in enumerate(terms))
    return (1 - load) * math.fsum(parts)


def pin(pid: int, processors: list[int]) -> None:
    """Let all threads of a process run on these processors only."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, processors)


def before_others(pid: int) -> None:
    """Let all threads of a process run before ordinary programs, where that is allowed."""
    with suppress(PermissionError):
        for thread in psutil.Process(pid).threads():
            os.sched_setscheduler(thread.id, os.SCHED_FIFO, os.sched_param(1))


def idle_since(before: Sequence[float]) -> float:
    """Return the share of the processors' time that nobody used."""
    spent = [now - was for now, was in zip(psutil.cpu_times(), before, strict=True)]
    return float(spent[psutil.cpu_times()._fields.index("idle")] / sum(spent))


def line(target: Target, stream: bool, rate: float, row: list[float], kind: str = "") -> str:
    idle, cost, *ms, queue, late = row
    kind += f"{target.name}, {'streamed' if stream else 'whole'}"
    pairs = [f"{ms[at]:.2f}, {ms[at + 1]:.2f}" for at in (0, 2, 4)]
    columns = [kind, f"{rate:.0f}", f"{idle:.2f}", f"{cost:.2f}", *pairs, f"{queue:.2f}"]
    return f"| {' | '.join([*columns, f'{late:.2f}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000, help="to find the saturation")
    parser.add_argument("--shared", action="store_true", help="all programs on all processors")
    options = parser.parse_args()
    uvloop.run(run(options.seconds, options.turns, options.requests, shared=options.shared))


if __name__ == "__main__":
    main()

"""Time that the gateway adds to a call at a third of its saturation, recording durably.

    python -m benchmarks.gateway.latency [--seconds 10] [--turns 5]

The gateway's saturation is the calls a second of 16 clients without a pause. Then calls arrive at
random times (a Poisson process), a third as many a second, whether or not earlier ones are
answered: at the trivial engine, and at the gateway before it, in turns. Prints for each turn p50
and p99 of both, and what the gateway adds, and their medians. Clients, engine, gateway and Postgres
share the machine. *Idle* is the share of its processors that nobody used: other programs show in
it, and beside them a latency is their wait for a processor.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import psutil

from babylon.store.calls import wait_until_recorded
from benchmarks.gateway.__main__ import CLIENTS, WARM_UP, free_ports
from benchmarks.gateway.contenders import ours, until_ready, upstream
from benchmarks.gateway.load import arriving, load

SHARE = 1 / 3  # of the saturation


async def run(seconds: float, turns: int, requests: int) -> None:
    """Measure and print.

    Raises:
        RuntimeError: an answer is wrong, or a call is not in the database.
    """
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port, port = free_ports(2)
        engine = stack.enter_context(upstream(engine_port, directory))
        await until_ready(f"{engine.url}/v1/models", engine.pid)
        gateway, store = await stack.enter_async_context(ours(port, engine_port, directory))
        sent = 0
        print(
            "| answers | calls/s | idle | direct p50, p99 ms | gateway p50, p99 | added p50, p99 |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for stream in (False, True):
            for count in (WARM_UP, requests):
                full = await load(
                    gateway, requests=count, clients=CLIENTS, stream=stream, long=False
                )
                sent += count
            rows = list[list[float]]()
            for turn in range(turns):
                await wait_until_recorded(store)
                before = psutil.cpu_times()
                found = list[float]()
                for target in (engine, gateway):
                    rate, seed = SHARE * full.rate, turn
                    one = await arriving(
                        target, rate=rate, seconds=seconds, stream=stream, seed=seed
                    )
                    found += [one.median_ms, one.p99_ms]
                sent += len(one.seconds)
                rows.append([idle_since(before), *found, found[2] - found[0], found[3] - found[1]])
                print(line(stream, rate, rows[-1]), flush=True)
            middle = [median(column) for column in zip(*rows, strict=True)]
            print(line(stream, rate, middle, "median, "), flush=True)
        await wait_until_recorded(store)
        stored = await store.pool.fetchval("SELECT count(*) FROM babylon.calls WHERE trainable")
        if stored != sent:
            raise RuntimeError(f"{stored} of {sent} calls are in the database")


def idle_since(before: Sequence[float]) -> float:
    """Return the share of the processors' time that nobody used."""
    spent = [now - was for now, was in zip(psutil.cpu_times(), before, strict=True)]
    return float(spent[psutil.cpu_times()._fields.index("idle")] / sum(spent))


def line(stream: bool, rate: float, row: list[float], kind: str = "") -> str:
    idle, *ms = row
    kind += "streamed" if stream else "whole"
    pairs = [f"{ms[at]:.2f}, {ms[at + 1]:.2f}" for at in (0, 2, 4)]
    return f"| {kind} | {rate:.0f} | {idle:.2f} | {' | '.join(pairs)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000, help="to find the saturation")
    options = parser.parse_args()
    asyncio.run(run(options.seconds, options.turns, options.requests))


if __name__ == "__main__":
    main()

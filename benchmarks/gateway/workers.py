"""Cost of a call through a gateway of one process and of several.

    python -m benchmarks.gateway.workers [--workers 2] [--requests 2000] [--turns 3]

Both gateways stand before the trivial engine, check keys and record every call in one Postgres, and
take turns, with 16 clients for each process. Prints the processor time of a call (user and system,
of all processes of a gateway, until they are idle again), its ratio, and the share of the work that
the busiest process did. Throughput per core is the inverse of that time.
"""

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import uvloop

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.serving.serve import gateway_processes
from babylon.store import open_store
from babylon.store.calls import wait_until_recorded
from babylon.store.policies import ensure_base
from benchmarks.gateway.__main__ import CLIENTS, REST_S, WARM_UP, cpu_s, free_ports
from benchmarks.gateway.contenders import until_ready, upstream
from benchmarks.gateway.load import Target, load


async def run(workers: int, requests: int, turns: int) -> None:
    """Measure and print.

    Raises:
        RuntimeError: an answer is wrong, or a call is not in the database.
    """
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port, *ports = free_ports(3)
        engine = stack.enter_context(upstream(engine_port, directory))
        await until_ready(f"{engine.url}/v1/models", engine.pid)
        settings: Settings = load_settings(home=directory / "home", database={"url": None})
        store = await stack.enter_async_context(open_store(settings))
        await ensure_base(store, uri="/canned", base_model="canned")
        key = str(local_key(settings.home.root))
        targets: dict[int, tuple[Target, list[int]]] = {}
        for number, port in zip((1, workers), ports, strict=True):
            chosen = settings.replace(
                serving={
                    "endpoint": f"http://localhost:{port}",
                    "engine_port": engine_port,
                    "workers": number,
                }
            )
            running, control = await stack.enter_async_context(
                gateway_processes(chosen.serving, settings.home, chosen.environment())
            )
            pids = [one.pid for one in running]
            for one in control:
                await until_ready(f"http://127.0.0.1:{one}/health", pids[0])
            target = Target(f"{number} processes", f"http://127.0.0.1:{port}", key, pids[0])
            targets[number] = target, pids
        print("| processes | answers | CPU-ms a call | of one process's | busiest process |")
        print("| ---: | --- | ---: | ---: | ---: |")
        for stream in (False, True):
            costs: dict[int, list[float]] = {number: [] for number in targets}
            shares: dict[int, list[float]] = {number: [] for number in targets}
            for turn in range(turns + 1):
                for number, (target, pids) in targets.items():
                    count = requests if turn else WARM_UP
                    before = [cpu_s(pid) for pid in pids]
                    clients = CLIENTS * number  # each process has as much to do as a single one
                    await load(target, requests=count, clients=clients, stream=stream, long=False)
                    await asyncio.sleep(REST_S)
                    spent = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
                    if turn:
                        costs[number].append(1000 * sum(spent) / count)
                        shares[number].append(max(spent) / sum(spent))
            for number in targets:
                ratios = [b / a for a, b in zip(costs[1], costs[number], strict=True)]
                print(
                    f"| {number} | {'streamed' if stream else 'whole'}"
                    f" | {median(costs[number]):.2f} | {median(ratios):.2f}"
                    f" | {median(shares[number]):.2f} |",
                    flush=True,
                )
        await wait_until_recorded(store)
        found = await store.pool.fetchval("SELECT count(*) FROM babylon.calls WHERE trainable")
        if found != (expected := 4 * (turns * requests + WARM_UP)):
            raise RuntimeError(f"{found} of {expected} calls are in the database")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2000, help="per turn and gateway")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    uvloop.run(run(options.workers, options.requests, options.turns))


if __name__ == "__main__":
    main()

"""Rates of one, two and four gateway processes, of one and two engines, and of one and two ranks.

    python -m benchmarks.scaling [--requests 1000] [--answers 64]

All share one machine, so a curve bends where its cores are used up: each row has the CPU cores that
were busy, of all processes of the part. Gateways stand before the trivial engine, check keys and
record every call. Engines answer 64 tokens of the built-in architecture to 16 clients, behind one
gateway. Ranks are gloo processes of one thread each, for an adapter and for all weights.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import Call, TrainingRow
from babylon.serving.serve import gateway_processes
from babylon.store import Store, open_store
from babylon.store.policies import ensure_base
from babylon.training.backends.own_trainer import run_job
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.train_report import TrainReport
from babylon.training.processes.job import UpdateJob
from babylon.training.processes.launch import run_in_processes
from babylon.training.trainable import DEFAULT_OPTIONS, Tuning
from benchmarks.engine import save_policies
from benchmarks.gateway.__main__ import CLIENTS, REST_S, WARM_UP, cpu_s, free_ports
from benchmarks.gateway.contenders import until_ready, upstream
from benchmarks.gateway.load import Target, load
from benchmarks.trainer.shapes import shared_window

NEW_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A rate of a part with ``units``. ``cores``: processor seconds of the part in a second."""

    part: str
    units: int
    rate: float
    cores: float | None

    def line(self, first: "Point") -> str:
        """The row of a Markdown table."""
        cores = "" if self.cores is None else f"{self.cores:.2f}"
        ratio = self.rate / first.rate
        return f"| {self.part} | {self.units} | {self.rate:,.1f} | {ratio:.2f} | {cores} |"


async def _gateway(
    stack: AsyncExitStack, settings: Settings, **serving: object
) -> tuple[Target, list[int]]:
    """Start a gateway; return its target and the ids of its processes."""
    (port,) = free_ports(1)
    chosen = settings.replace(serving={"endpoint": f"http://localhost:{port}", **serving})
    running, control = await stack.enter_async_context(
        gateway_processes(chosen.serving, settings.home, chosen.environment())
    )
    pids = [one.pid for one in running]
    for one in control:
        await until_ready(f"http://127.0.0.1:{one}/health", pids[0])
    key = str(local_key(settings.home.root))
    return Target("gateway", f"http://127.0.0.1:{port}", key, pids[0]), pids


async def gateways(settings: Settings, store: Store, requests: int) -> list[Point]:
    """Calls a second through one, two and four processes."""
    points = []
    with ExitStack() as stack:
        (engine_port,) = free_ports(1)
        engine = stack.enter_context(upstream(engine_port, settings.home.root))
        await until_ready(f"{engine.url}/v1/models", engine.pid)
        for number in (1, 2, 4):
            async with AsyncExitStack() as running:
                target, pids = await _gateway(
                    running, settings, engine_port=engine_port, workers=number
                )
                clients = CLIENTS * number
                await load(target, requests=WARM_UP, clients=clients, stream=False, long=False)
                before, started = sum(map(cpu_s, pids)), time.monotonic()
                done = await load(
                    target, requests=requests, clients=clients, stream=False, long=False
                )
                cores = (sum(map(cpu_s, pids)) - before) / (time.monotonic() - started)
                points.append(
                    Point(part="gateways, calls/s", units=number, rate=done.rate, cores=cores)
                )
                await asyncio.sleep(REST_S)
    return points


def _engine(home: Path, port: int) -> "subprocess.Popen[bytes]":
    module = "babylon.serving.engine.engine_process"
    return subprocess.Popen(
        [sys.executable, "-m", module, f"--port={port}", f"--home={home}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


async def engines(settings: Settings, answers: int) -> list[Point]:
    """Tokens a second of one and two engines behind a gateway."""
    points = []
    for number in (1, 2):
        ports = free_ports(number)
        started = [_engine(settings.home.root, port) for port in ports]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        try:
            for url, process in zip(urls, started, strict=True):
                await until_ready(f"{url}/v1/models", process.pid)
            async with AsyncExitStack() as stack:
                target, _ = await _gateway(
                    stack, settings, engine="remote", engine_url=",".join(urls)
                )
                await _ask(target, CLIENTS)
                await asyncio.sleep(3)  # until the gateway knows what the second engine holds
                pids = [process.pid for process in started]
                before, begun = sum(map(cpu_s, pids)), time.monotonic()
                await _ask(target, answers)
                took = time.monotonic() - begun
                cores = (sum(map(cpu_s, pids)) - before) / took
                rate = answers * NEW_TOKENS / took
                points.append(Point(part="engines, tokens/s", units=number, rate=rate, cores=cores))
        finally:
            for process in started:
                process.terminate()
                process.wait()
    return points


async def _ask(target: Target, answers: int) -> None:
    """Ask for whole answers by 16 clients. Each client has a conversation of its own."""
    left = iter(range(answers))

    async def client(number: int) -> None:
        body = {
            "model": "babylon",
            "messages": [{"role": "user", "content": f"Agent {number}, decide."}],
            "max_tokens": NEW_TOKENS,
        }
        headers = {"Authorization": f"Bearer {target.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in left:
                url = f"{target.url}/v1/chat/completions"
                async with session.post(url, json=body) as response:
                    if response.status != 200:
                        raise RuntimeError(f"{response.status}: {await response.text()}")
                    await response.read()

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


def _window() -> tuple[TrainingRow, ...]:
    rows = []
    for number, one in enumerate(shared_window()):
        call = Call(
            step=0,
            messages=(),
            response="",
            prompt_token_ids=tuple(token % 256 for token in one.prompt),
            completion_token_ids=tuple(token % 256 for token in one.completion),
        )
        name = str(number)
        rows.append(
            TrainingRow(
                trajectory_id=name,
                agent_id=name,
                scenario_id=str(number // 10),
                score=float(number % 10),
                calls=(call,),
            )
        )
    return tuple(rows)


def ranks(model: Path, directory: Path) -> list[Point]:
    """Trained tokens a second of one process and of two gloo ranks."""
    points = []
    os.environ["OMP_NUM_THREADS"] = "1"
    tunings: Sequence[Tuning] = ("lora", "full")
    for tuning in tunings:
        for number in (1, 2):
            job = UpdateJob(
                parent=str(model),
                rows=_window(),
                target=directory / f"{tuning}-{number}",
                tuning=tuning,
                config=TrainerConfig(iterations=2, learning_rate=1e-6),
                transfer_layers="all",
                options=DEFAULT_OPTIONS,
                staleness={},
                optimizer=None,
                progress_directory=None,
                home=None,
            )
            update = run_in_processes(job, number, None) if number > 1 else run_job(job, None)
            assert isinstance(update.report, TrainReport)
            rate = update.report.trained_tokens_per_s
            name = f"ranks ({tuning}), trained tokens/s"
            points.append(Point(part=name, units=number, rate=rate, cores=None))
    return points


async def run(requests: int, answers: int) -> None:
    """Measure, and print a table."""
    print(f"{psutil.cpu_count()} cores\n")
    print("| part | units | rate | of one | cores busy |\n| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        model = save_policies(directory)["tiny (96 x 3)"]
        settings: Settings = load_settings(home=directory / "home", database={"url": None})
        async with open_store(settings) as store:
            await ensure_base(store, uri=str(model), base_model="tiny")
            found = await gateways(settings, store, requests)
            found += await engines(settings, answers)
        found += await asyncio.to_thread(ranks, model, directory)
    first: dict[str, Point] = {}
    for point in found:
        print(point.line(first.setdefault(point.part, point)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000, help="of each gateway")
    parser.add_argument("--answers", type=int, default=64, help="of each number of engines")
    options = parser.parse_args()
    asyncio.run(run(options.requests, options.answers))


if __name__ == "__main__":
    main()

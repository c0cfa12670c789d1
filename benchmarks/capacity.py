"""Load of a fleet on every part, what breaks first, and what to add then.

    python -m benchmarks.capacity --agents 10000 [--costs FILE]   plan
    python -m benchmarks.capacity --measure FILE                  measure the costs here, and check

The plan multiplies unit costs by the load of a fleet. ``--measure`` measures the costs of a
gateway, Postgres and the trainer: processor time and bytes of short and of long calls, and of the
gradient of a small window. Then it predicts a mixed load and a larger window, runs them, and exits
with 1 if a prediction is more than 20 % off. Costs of an engine, of a judge and of a trainer's GPU
depend on the model: measure them where they run, and set them in FILE.
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch

from babylon.evaluation.arena.worlds import BATCH
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens
from benchmarks.gateway.__main__ import CLIENTS, REST_S, WARM_UP, cpu_s, free_ports
from benchmarks.gateway.contenders import ours, until_ready, upstream
from benchmarks.gateway.load import Target, load
from benchmarks.gateway.upstream import LONG_PROMPT_TOKENS, LONG_TOKENS, PROMPT_TOKENS, TOKENS
from benchmarks.trainer.shapes import model_of, shared_window

SHORT, LONG = PROMPT_TOKENS + TOKENS, LONG_PROMPT_TOKENS + LONG_TOKENS
ALLOWED = 0.2
TURNS = 3
BUSY = 0.6  # of a core, so that bursts find room


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """Processor time and bytes of one unit of work. A line is ``base + token * tokens``."""

    gateway_s: float  # CPU seconds of a call
    gateway_token_s: float
    postgres_s: float
    postgres_token_s: float
    stored_bytes: float  # of a call in Postgres, with its indexes
    stored_token_bytes: float
    trained_token_s: float  # of one pass forward and backward, of a completion token
    judge_tokens: float = 3000.0  # of a trajectory; `babylon judge cost` has yours
    engine_tokens_s: float = 2500.0  # answered by one engine in a second


# The gateway's is that of docs/benchmarks/serving.md; the others are estimates, which --measure
# replaces.
ASSUMED = UnitCosts(
    gateway_s=0.00043,
    gateway_token_s=0.0,
    postgres_s=0.0003,
    postgres_token_s=0.0,
    stored_bytes=1500.0,
    stored_token_bytes=6.0,
    trained_token_s=0.001,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The work of all agents in an hour. One trajectory of each is trained."""

    agents: int
    calls_an_hour: float = 60.0
    prompt_tokens: float = 200.0
    completion_tokens: float = 16.0
    passes: int = 10  # ITERATIONS
    trajectories: int = 1000  # TARGET_TRAJECTORIES
    thinned: float = 0.3  # MAX_DROPOUT

    @property
    def calls_s(self) -> float:
        """Calls in a second."""
        return self.agents * self.calls_an_hour / 3600

    @property
    def trained(self) -> float:
        """Trajectories of an hour that are scored and trained."""
        return max(min(self.agents, self.trajectories), self.agents * (1 - self.thinned))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The load of one part. ``needed`` units carry it; ``bound`` units is the most of this kind."""

    name: str
    load: str
    needed: float
    unit: str
    bound: float
    then: str

    @property
    def broken(self) -> bool:
        return self.needed > self.bound


def plan(fleet: Fleet, costs: UnitCosts) -> list[Part]:
    """Every part under the load of a fleet, the most overloaded first."""
    tokens = fleet.prompt_tokens + fleet.completion_tokens
    calls = fleet.calls_s
    gateway = calls * (costs.gateway_s + tokens * costs.gateway_token_s) / BUSY
    postgres = calls * (costs.postgres_s + tokens * costs.postgres_token_s) / BUSY
    stored = calls * (costs.stored_bytes + tokens * costs.stored_token_bytes)
    replies = calls * fleet.completion_tokens
    learned = fleet.trained * fleet.calls_an_hour * fleet.completion_tokens * fleet.passes
    judged = fleet.trained * costs.judge_tokens / 60
    # bounds: what one machine, or one account, usually has; a fleet that needs more adds units
    parts = [
        Part(
            name="gateways",
            load=f"{calls:,.1f} calls/s",
            needed=gateway,
            unit="cores",
            bound=2,
            then="GATEWAY_WORKERS up to the machine's cores, then gateways on more machines",
        ),
        Part(
            name="engines",
            load=f"{replies:,.0f} tokens/s",
            needed=replies / costs.engine_tokens_s / BUSY,
            unit="engines",
            bound=1,
            then="ENGINE_URL with more engines, or a gateway with vLLM for each GPU",
        ),
        Part(
            name="Postgres, writing",
            load=f"{stored / 2**20:,.2f} MiB/s",
            needed=postgres,
            unit="cores",
            bound=16,
            then="record a share of the agents: one primary takes all calls of a fleet",
        ),
        Part(
            name="Postgres, disk",
            load=f"{stored * 86400 / 2**30:,.1f} GiB a day",
            needed=stored * 86400 * 7 / 2**40,
            unit="TiB for 7 days",
            bound=4,
            then="shorter retention of calls; GAME_DATABASE_URL for reads of a replica",
        ),
        Part(
            name="trainer",
            load=f"{learned:,.0f} tokens an hour",
            needed=learned * costs.trained_token_s / 3600,
            unit="devices",
            bound=1,
            then="TRAIN_PROCESSES, then TRAIN_NODES, or a larger MAX_DROPOUT",
        ),
        Part(
            name="judge",
            load=f"{judged:,.0f} tokens/min",
            needed=judged / 2_000_000,
            unit="accounts of 2M tokens/min",
            bound=1,
            then="a larger MAX_DROPOUT: a sample of the trajectories teaches as much",
        ),
        Part(
            name="gate",
            load=f"{16 * BATCH:,} worlds an hour",
            needed=1,
            unit="device",
            bound=math.inf,  # of agents: its load stays
            then="nothing: the gate does not grow with the fleet",
        ),
    ]
    return sorted(parts, key=lambda part: part.needed / part.bound, reverse=True)


def first_to_break(fleet: Fleet, costs: UnitCosts) -> tuple[Part, int]:
    """The part that the growing fleet overloads first, and the number of agents at which it does.

    The search is by halves: the trained trajectories do not grow in proportion to the agents.
    """
    least, most = 0, 10**12
    while most - least > 1:
        agents = (least + most) // 2
        if plan(replace(fleet, agents=agents), costs)[0].broken:
            most = agents
        else:
            least = agents
    return plan(replace(fleet, agents=most), costs)[0], most


def table(parts: list[Part]) -> str:
    """The parts as Markdown."""
    lines = [
        "| part | load | needs | carries | beyond that |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for part in parts:
        needed = f"**{part.needed:,.2f}**" if part.broken else f"{part.needed:,.2f}"
        lines.append(
            f"| {part.name} | {part.load} | {needed} {part.unit} | {part.bound:g} | {part.then} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of a load: CPU seconds of gateway and Postgres, and bytes stored."""

    gateway: float
    postgres: float
    stored: float


def line(short: float, long: float) -> tuple[float, float]:
    """Base and slope through the costs of a short and a long call, the base not negative."""
    slope = (long - short) / (LONG - SHORT)
    return max(0.0, short - slope * SHORT), slope


def predicted(costs: UnitCosts, calls: dict[int, int]) -> Spent:
    """The cost of calls: tokens of one → number."""
    count, tokens = sum(calls.values()), sum(size * number for size, number in calls.items())
    return Spent(
        count * costs.gateway_s + tokens * costs.gateway_token_s,
        count * costs.postgres_s + tokens * costs.postgres_token_s,
        count * costs.stored_bytes + tokens * costs.stored_token_bytes,
    )


async def _run(target: Target, store: Store, postgres: int, calls: dict[int, int]) -> Spent:
    """Ask for some calls, wait until they are stored, and return what they cost."""
    stored = await _stored(store)
    before = cpu_s(target.pid), cpu_s(postgres)
    for tokens, number in calls.items():
        await load(target, requests=number, clients=CLIENTS, stream=False, long=tokens == LONG)
    await wait_until_recorded(store)
    await asyncio.sleep(REST_S)
    after = cpu_s(target.pid), cpu_s(postgres)
    return Spent(after[0] - before[0], after[1] - before[1], await _stored(store) - stored)


async def _stored(store: Store) -> float:
    return float(
        await store.pool.fetchval(
            "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits"
            " WHERE inhparent = 'babylon.calls'::regclass"
        )
    )


async def measure_serving(short: int, long: int) -> tuple[UnitCosts, list[str], bool]:
    """Measure a call of either length, then predict and run a mix. Medians over the turns."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port, port = free_ports(2)
        engine = stack.enter_context(upstream(engine_port, directory))
        await until_ready(f"{engine.url}/v1/models", engine.pid)
        target, store = await stack.enter_async_context(ours(port, engine_port, directory))
        pid = next((directory / "home").rglob("postmaster.pid")).read_text().split()[0]
        postgres = psutil.Process(int(pid)).pid
        await _run(target, store, postgres, {SHORT: WARM_UP})
        # half as many of both, in another order of sizes: a line must predict it
        mix = {SHORT: short // 2, LONG: long // 2}
        rounds = [
            [
                await _run(target, store, postgres, calls)
                for calls in ({SHORT: short}, {LONG: long}, mix)
            ]
            for _ in range(TURNS)
        ]

    def median(which: int, field: str, number: int) -> float:
        values = sorted(float(getattr(one[which], field)) / number for one in rounds)
        return values[len(values) // 2]

    lines = {
        field: line(median(0, field, short), median(1, field, long))
        for field in ("gateway", "postgres", "stored")
    }
    costs = replace(
        ASSUMED,
        gateway_s=lines["gateway"][0],
        gateway_token_s=lines["gateway"][1],
        postgres_s=lines["postgres"][0],
        postgres_token_s=lines["postgres"][1],
        stored_bytes=lines["stored"][0],
        stored_token_bytes=lines["stored"][1],
    )
    expected, found, good = predicted(costs, mix), [], True
    for field in ("gateway", "postgres", "stored"):
        real, guess = median(2, field, 1), getattr(expected, field)
        good &= abs(guess / real - 1) <= ALLOWED
        found.append(f"{field}: predicted {guess:.4g}, measured {real:.4g}, {guess / real:.2f}")
    return costs, found, good


def measure_training() -> tuple[float, list[str], bool]:
    """CPU seconds of a trained token, from a quarter of a window, checked on the whole window."""
    torch.set_num_threads(1)
    model, calls = model_of("qwen3"), shared_window()
    forward = PolicyForward(model)

    def cost(chosen: list[CallTokens]) -> float:
        started = time.process_time()
        forward.accumulate(compile_tree(chosen), lambda _, values: values.logprobs.sum())
        spent = time.process_time() - started
        model.zero_grad(set_to_none=True)
        return spent / sum(len(call.completion) for call in chosen)

    part = [call for at in range(0, len(calls), 10) for call in calls[at : at + 5]]
    cost(part)
    pairs = [(cost(part), cost(calls)) for _ in range(TURNS)]
    # agents of a scenario share its prompt, so a token of half of them costs more
    share = compile_tree(part).unique_tokens / len(part)
    unit = sorted(small for small, _ in pairs)[TURNS // 2]
    whole = sorted(large for _, large in pairs)[TURNS // 2]
    guess = unit * (compile_tree(calls).unique_tokens / len(calls)) / share
    line_ = f"trainer: predicted {guess:.4g} s a token, measured {whole:.4g}, {guess / whole:.2f}"
    return whole, [line_], abs(guess / whole - 1) <= ALLOWED


def main() -> int:
    """Print a plan, or measure the costs. Return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--costs", type=Path, help="JSON file with unit costs")
    parser.add_argument("--measure", type=Path, help="measure here, and write the costs")
    parser.add_argument("--requests", type=int, default=600)
    options = parser.parse_args()
    if options.measure:
        costs, lines, good = asyncio.run(
            measure_serving(options.requests, max(4, options.requests // 10))
        )
        token_s, more, as_good = measure_training()
        costs = replace(costs, trained_token_s=token_s)
        options.measure.write_text(json.dumps(asdict(costs), indent=1))
        print("\n".join([*lines, *more]))
        return 0 if good and as_good else 1
    known = json.loads(options.costs.read_text()) if options.costs else {}
    fleet, costs = Fleet(agents=options.agents), replace(ASSUMED, **known)
    print(table(plan(fleet, costs)))
    part, agents = first_to_break(fleet, costs)
    verb = "breaks" if agents < options.agents else "would break"
    print(f"\n{part.name} {verb} first, at about {agents:,} agents: {part.then}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

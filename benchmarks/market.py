"""Speed of the game, scalar and vectorised.

    python -m benchmarks.market [--json FILE] [--turns N]

Prints a Markdown table with wall time, processor time and rate of each contender, medians over the
turns. Everything runs on one core under the hour's rules (perps, funding, resolutions, feed). Each
turn runs every contender once, so that other load affects all of them. The contenders:

- One hour of 20 scripted agents in one market, from its making to the settlement; also compared
  with real time.
- Random actions through the vectorised core, including observations and new worlds from a pool:
  one trader per world as ``gymnasium.vector.VectorEnv``, and 20 traders in every market.
- The scalar game: ``Game`` with a scripted random agent, and Gymnasium's ``SyncVectorEnv`` over
  ``TraderEnv`` with random actions like the vectorised one's.
- Making worlds, the work that the pool saves.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from babylon.game.envs import TraderEnv, TraderVectorEnv
from babylon.game.envs.actions import action_space, to_orders
from babylon.game.envs.observation import observe
from babylon.game.envs.vector_core import Core
from babylon.game.envs.worlds import from_scenarios
from babylon.game.market.game import Game, make_market
from babylon.game.market.scenario import HOUR, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS, random_trader

HOUR_S = 3600.0
REFERENCE = "SyncVectorEnv of TraderEnv"
Work = Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Amount of play per contender and turn."""

    agents: int = 20  # agents in one market
    envs: int = 1024  # rows of the vector environment
    markets: int = 256  # rows of the core with ``agents`` each
    plays: int = 2  # plays per row of the vector environment
    pool: int = 256  # worlds in the pool
    scalar_games: int = 10
    sync_envs: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A contender's medians.

    ``units`` is the work of one turn. ``times_reference`` compares agent-steps per second with
    Gymnasium's ``SyncVectorEnv``, ``times_real_time`` a game hour with a real hour.
    """

    name: str
    unit: str
    units: int
    wall_s: float
    cpu_s: float
    per_second: float
    per_cpu_second: float  # rate of an otherwise idle core
    times_reference: float | None = None
    times_real_time: float | None = None


def scripted_hour(sizes: Sizes) -> Work:
    """Play one hour of all scripted agents in one market → agent-steps."""
    names = [*islice(cycle(SCRIPTED_AGENTS), sizes.agents)]

    def play() -> int:
        market = make_market(make_scenario("benchmark", HOUR))
        seats = [market.join(f"{name}-{number}") for number, name in enumerate(names)]
        randoms = [Random(number) for number in range(len(names))]
        while not market.over:
            market.step(
                {
                    seat.account.name: SCRIPTED_AGENTS[name](seat, random)
                    for name, seat, random in zip(names, seats, randoms, strict=True)
                }
            )
        market.settle()
        return market.tick * len(names)

    return play


def vectorised(sizes: Sizes) -> Work:
    """Play one trader per world → agent-steps."""
    envs = TraderVectorEnv(sizes.envs, HOUR, worlds=sizes.pool)
    return _stepping(envs, sizes.plays * HOUR.ticks)


def synchronous(sizes: Sizes) -> Work:
    """Play Gymnasium's loop over single environments → agent-steps."""
    envs = SyncVectorEnv([lambda: TraderEnv(HOUR)] * sizes.sync_envs)
    return _stepping(envs, HOUR.ticks)


def _stepping(envs: VectorEnv, steps: int) -> Work:
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(steps)]
    envs.reset(seed=0)

    def play() -> int:
        for action in actions:
            envs.step(action)
        return steps * envs.num_envs

    return play


def shared_markets(sizes: Sizes) -> Work:
    """Play many traders in every market → agent-steps."""
    scenarios = [make_scenario(seed, HOUR) for seed in range(sizes.markets)]
    core = Core(from_scenarios(scenarios, sizes.agents), sizes.markets)
    space = action_space(HOUR.markets, HOUR.perps)
    shape = (HOUR.ticks, sizes.markets, sizes.agents, len(space.nvec))
    actions = np.random.default_rng(0).integers(space.nvec, size=shape)

    def play() -> int:
        core.start(core.rows, core.rows)
        for action in actions:
            core.step(to_orders(action, core.ledger, core.rules))
            observe(core.ledger, core.worlds, core.equity)
        return HOUR.ticks * sizes.markets * sizes.agents

    return play


def scalar(sizes: Sizes) -> Work:
    """Play the scalar game without observations → agent-steps."""
    scenarios = [make_scenario(seed, HOUR) for seed in range(sizes.scalar_games)]

    def play() -> int:
        for number, scenario in enumerate(scenarios):
            game, random = Game(scenario), Random(number)
            while not game.over:
                game.act(random_trader(game, random))
                _ = game.equity
            game.settle()
        return len(scenarios) * HOUR.ticks

    return play


def world_making(sizes: Sizes) -> Work:
    """Make scenarios from seeds and convert them to arrays → worlds."""

    def make() -> int:
        return from_scenarios([make_scenario(seed, HOUR) for seed in range(sizes.pool)]).count

    return make


CONTENDERS: dict[str, tuple[str, Callable[[Sizes], Work]]] = {
    "a game hour of scripted agents in one market": ("agent-steps", scripted_hour),
    "TraderVectorEnv": ("agent-steps", vectorised),
    "vectorised core, shared markets": ("agent-steps", shared_markets),
    "scalar Game": ("agent-steps", scalar),
    REFERENCE: ("agent-steps", synchronous),
    "making worlds": ("worlds", world_making),
}


def measure(sizes: Sizes, turns: int) -> list[Speed]:
    """Time every contender in every turn, after a warm-up turn."""
    works = {name: make(sizes) for name, (_, make) in CONTENDERS.items()}
    units = {name: work() for name, work in works.items()}
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            timed[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return _results(units, timed)


def _results(units: dict[str, int], timed: dict[str, list[tuple[float, float]]]) -> list[Speed]:
    wall = {name: median(wall for wall, _ in times) for name, times in timed.items()}
    cpu = {name: median(cpu for _, cpu in times) for name, times in timed.items()}
    rate = {name: units[name] / wall[name] for name in units}
    return [
        Speed(
            name=name,
            unit=unit,
            units=units[name],
            wall_s=wall[name],
            cpu_s=cpu[name],
            per_second=rate[name],
            per_cpu_second=units[name] / cpu[name],
            times_reference=rate[name] / rate[REFERENCE] if unit == "agent-steps" else None,
            times_real_time=HOUR_S / wall[name] if make is scripted_hour else None,
        )
        for name, (unit, make) in CONTENDERS.items()
    ]


def table(results: Sequence[Speed]) -> str:
    """Return a Markdown table."""
    heads = ("contender", "a turn", "wall", "processor", "per second", "per second of processor")
    lines = [f"| {' | '.join((*heads, '× SyncVectorEnv', '× real time'))} |", "| --- " * 8 + "|"]
    for result in results:
        cells = (
            result.name,
            f"{result.units:,} {result.unit}",
            f"{result.wall_s * 1e3:.1f} ms",
            f"{result.cpu_s * 1e3:.1f} ms",
            f"{result.per_second:,.0f}",
            f"{result.per_cpu_second:,.0f}",
            _times(result.times_reference),
            _times(result.times_real_time),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:,.1f}"


def use_one_core() -> None:
    """Pin the process to one core, if the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the game, scalar and vectorised.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args()
    use_one_core()
    results = measure(Sizes(), options.turns)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()

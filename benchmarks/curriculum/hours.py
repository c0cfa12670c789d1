"""Hours of a level in a row: each is played, scored and trained in this process."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from babylon.core.learning_settings import TrainingSettings
from babylon.core.trajectories import TrainingRow, Trajectory
from babylon.game.market.levels import CurriculumLevel
from babylon.game.market.scenario import Scenario
from babylon.store.fleet_pairs import FleetPair
from benchmarks.curriculum.play import (
    AGENTS_A_WORLD,
    Sampler,
    look,
    played,
    scored,
    wealth_after,
    worlds_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """An hour of one seed. Mean P&L in simulator dollars; ``looked``: of the policy after it.

    ``wealth``: the balances with which the agents begin the next hour, if they keep their wealth.
    """

    level: str
    seed: int
    hour: int
    fleet_pnl: float
    failed: float  # share of the fleet's actions, malformed and refused
    kl_after: float | None
    entropy: float | None
    cpu_s: float
    undone: int = 0
    gate: str = ""
    gains: tuple[float | None, ...] = ()  # of a population's members over the policy that played
    pairs: tuple[
        FleetPair, ...
    ] = ()  # of the gate: the fleet and the base model in the same worlds
    looked: float | None = None
    wealth: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """An hour's play as an update gets it, the policy that played, and the hours before."""

    level: CurriculumLevel
    hour: int
    base: Path
    policy: Path
    worlds: Sequence[Scenario]
    play: Sequence[Trajectory]
    rows: Sequence[TrainingRow]
    seed: int
    before: Sequence[Hour] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The figures of an update: nats a token, the iterations that were undone, the gate's words.

    ``None``: nothing was trained, or the trainer does not say.
    """

    kl_after: float | None = None
    entropy: float | None = None
    undone: int = 0
    gate: str = ""
    gains: tuple[float | None, ...] = ()
    pairs: tuple[FleetPair, ...] = ()


Update = Callable[[Window, TrainingSettings, Path], Moved]


def taught(
    level: CurriculumLevel, base: Path, *, seed: int, hours: int, agents: int, directory: Path
) -> Path:
    """Teach the base model the best of its own plays of every world of all hours (SFT only)."""
    from babylon.training.sft import fine_tune

    best: dict[str, TrainingRow] = {}
    sampler = Sampler(str(base))
    wealth: Sequence[float] = ()
    for hour in range(hours):
        worlds = worlds_of(level, seed, hour, agents // AGENTS_A_WORLD)
        play = played(sampler, worlds, seed, level.shared, wealth)
        wealth = wealth_after(level.rules(hour), play, wealth) if level.shared else ()
        for row in scored(play):
            if row.scenario_id not in best or row.score > best[row.scenario_id].score:
                best[row.scenario_id] = row
    target = directory / f"sft-{level.name}-{seed}"
    fine_tune(base, [*best.values()], target, tuning="full", batch_size=8)
    return target


def learn(
    level: CurriculumLevel,
    base: Path,
    training: TrainingSettings,
    *,
    seed: int,
    hours: int,
    agents: int,
    looks: Sequence[int],
    directory: Path,
    first: int = 0,
    update: Update,
) -> Iterator[tuple[Hour, Path]]:
    """Play and train ``hours`` hours from ``first`` on. Without a gate every update serves at once.

    ``directory`` keeps the hours and the newest policy, and a later call goes on from there.
    """
    known = directory / "hours.jsonl"
    policy, before = base, list[Hour]()
    for line in known.read_bytes().splitlines() if known.exists() else ():
        hour = msgspec.json.decode(line, type=Hour)
        policy = directory / str(hour.hour)
        before.append(hour)
        yield hour, policy
    for number in range(first if policy == base else int(policy.name) + 1, first + hours):
        began = time.process_time()
        worlds = worlds_of(level, seed, number, agents // AGENTS_A_WORLD)
        wealth = before[-1].wealth if before else ()
        play = played(Sampler(str(policy)), worlds, seed, level.shared, wealth)
        window = Window(
            level=level,
            hour=number,
            base=base,
            policy=policy,
            worlds=worlds,
            play=play,
            rows=scored(play),
            seed=seed,
            before=tuple(before),
        )
        moved = update(window, training, directory / str(number))
        failed = [payoff.failed for own in play for payoff in own.payoffs]
        earlier, policy = policy, directory / str(number)
        hour = Hour(
            level=level.name,
            seed=seed,
            hour=number,
            fleet_pnl=sum(own.pnl_usd for own in play) / len(play),
            failed=sum(failed) / len(failed),
            kl_after=moved.kl_after,
            entropy=moved.entropy,
            undone=moved.undone,
            gate=moved.gate,
            gains=moved.gains,
            pairs=moved.pairs,
            cpu_s=time.process_time() - began,
            looked=look(level, number, policy).mean_pnl if number in looks else None,
            wealth=(*wealth_after(level.rules(number), play, wealth),) if level.shared else (),
        )
        with known.open("ab") as lines:
            lines.write(msgspec.json.encode(hour) + b"\n")
        before.append(hour)
        if earlier != base:
            shutil.rmtree(earlier)
        yield hour, policy

"""``python -m benchmarks.population``: the luck of the best of N, and the cost of N siblings.

**Luck.** N siblings that are no better than the champion play 128 worlds, and the one with the
highest P&L goes to the gate. Differences of P&L are drawn from those of two random traders in the
same worlds of the starter game, centred, so that nobody is better. Counted are promotions by the
gate's own bets: on fresh worlds, as the gate plays, and on the worlds of the choice.

**Cost.** N siblings are trained on one window, on one base and each on a base of its own; the peak
of memory is that of a process that trains N.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from babylon.core.trajectories import Call, TrainingRow
from babylon.evaluation.arena.betting import CERTAIN, Differences, log_wealth
from babylon.evaluation.arena.bounds import most_lost, most_won
from babylon.evaluation.arena.play import play, scripted
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.scenario import STARTER
from babylon.game.market.scripted import random_trader
from babylon.policies.tokenizer import train_tokenizer
from babylon.training.grpo.config import TrainerConfig
from babylon.training.trainable import SharedBase, TuningOptions
from babylon.training.update import update_checkpoint
from benchmarks.trainer.models import build_model, qwen3

Floats = NDArray[np.float64]
CHOICE, BUDGET = 128, 2048  # worlds


def differences(worlds: int) -> Floats:
    """P&L differences ``[worlds]`` of two random traders, with mean 0."""
    scenarios = unseen_scenarios("fitness", "benchmark", worlds, STARTER)
    one, other = (play(scripted(random_trader, seed), scenarios).pnl for seed in (1, 2))
    difference = one - other
    centred: Floats = difference - difference.mean()
    return centred


def promoted(values: Floats, budget: int) -> float:
    """Share of the runs ``[runs, worlds]`` that the gate's bets promote at any look."""
    credit, lost = most_won(STARTER), most_lost(STARTER)
    room = np.full_like(values, credit + lost)
    wealth = log_wealth(Differences(values, room, room), budget)
    return float((wealth.max(-1) >= CERTAIN).mean())


def luck(pool: Floats, siblings: int, runs: int, seed: int) -> dict[str, object]:
    """Promotions of the best of equal siblings."""
    generator = np.random.default_rng(seed)
    choice = generator.choice(pool, (runs, siblings, CHOICE))
    best = choice.mean(-1).argmax(-1)
    chosen = choice[np.arange(runs), best]
    fresh = generator.choice(pool, (runs, BUDGET))
    return {
        "siblings": siblings,
        "luck_usd": round(float(chosen.mean()), 2),
        "promoted_on_fresh_worlds": promoted(fresh, BUDGET),
        "promoted_on_the_worlds_of_the_choice": promoted(chosen, CHOICE),
    }


def _rows(count: int) -> list[TrainingRow]:
    random = Random(0)
    shared = tuple(random.randrange(200) for _ in range(200))
    return [
        TrainingRow(
            trajectory_id=str(number),
            agent_id=str(number),
            scenario_id="s",
            score=random.random(),
            calls=(
                Call(
                    step=0,
                    messages=(),
                    response="",
                    prompt_token_ids=(*shared, number),
                    completion_token_ids=tuple(random.randrange(200) for _ in range(20)),
                ),
            ),
        )
        for number in range(count)
    ]


@contextmanager
def _family(hidden: int, layers: int) -> Iterator[tuple[Path, Callable[[int, SharedBase], None]]]:
    """A base model on disk, and a function that trains sibling number n of one window on it."""
    rows = _rows(8)
    with tempfile.TemporaryDirectory() as directory:
        parent = Path(directory) / "base"
        tokenizer = train_tokenizer(iter(["some words"] * 9), 300)
        config = qwen3(hidden, layers)
        config.eos_token_id = config.pad_token_id = 0
        build_model(config, 0).save_pretrained(parent)
        tokenizer.save_pretrained(parent)

        def train(number: int, base: SharedBase) -> None:
            update_checkpoint(
                parent,
                rows,
                parent.with_name("child"),
                tuning="lora",
                config=TrainerConfig(iterations=1, learning_rate=1e-5 * (number + 1)),
                options=TuningOptions(),
                base=base,
            )
            base.restore()

        yield parent, train


def cost(siblings: int, hidden: int, layers: int) -> dict[str, object]:
    """Seconds of the processor for all siblings of a window, apart from the update's own."""
    with _family(hidden, layers) as (parent, train):

        def together() -> None:
            base = SharedBase.below(parent)
            for number in range(siblings):
                train(number, base)

        def apart() -> None:
            for number in range(siblings):
                train(number, SharedBase.below(parent))

        apart()  # warm
        seconds = {"one_base": _seconds(together), "own_bases": _seconds(apart)}
        own = parent.with_name("child") / "adapter_model.safetensors"
        return {
            "siblings": siblings,
            "base_mib": round(_base_mib(parent), 1),
            "adapter_mib": round(own.stat().st_size / 2**20, 2),
            **{f"{name}_s": round(value, 2) for name, value in seconds.items()},
        }


def memory(siblings: int, hidden: int, layers: int) -> dict[str, object]:
    """Peak of a process's memory in MiB, above that before the base was loaded."""
    with _family(hidden, layers) as (parent, train):
        before = _peak_mib()
        base = SharedBase.below(parent)
        for number in range(siblings):
            train(number, base)
        return {
            "siblings": siblings,
            "base_mib": round(_base_mib(parent), 1),
            "peak_mib": round(_peak_mib() - before, 1),
        }


def _base_mib(parent: Path) -> float:
    return sum(file.stat().st_size for file in parent.glob("*.safetensors")) / 2**20


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _seconds(run: Callable[[], None]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.population", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--worlds", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pool = differences(options.worlds)
    for siblings in (1, 4, 8):
        print(json.dumps(luck(pool, siblings, options.runs, options.seed)), flush=True)
    print(json.dumps(cost(4, 512, 8)))
    for siblings in (1, 4, 8):
        # a process of its own: memory that was in use once stays in its peak
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            print(json.dumps(alone.submit(memory, siblings, 768, 12).result()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Learning on the levels of the curriculum, beside its baselines.

    python -m benchmarks.curriculum [--level L0] [--arm ours] [--seeds 0 1] [--hours 8]
        [--agents 64] [--base CHECKPOINT] [--set credit=trajectory preferences.nll=0.2 ...]
    python -m benchmarks.curriculum --table
    python -m benchmarks.curriculum --reader DIRECTORY      make a base model that reads words

Arms: ``ours``, the demo's recipe; ``reinforce``, the same hours with one pass of REINFORCE on whole
trajectories; ``sft``, the base model taught the best of its own plays; ``ppo``, PPO from scratch on
the Gymnasium view, which sees features. All are compared with the base model and the best scripted
rule on the same unseen worlds. ``population``: siblings with the learning rates of ``FOUNDERS``
in every hour, of which the fittest goes on; the arms to compare are ``ours`` with each of them.

Each run (level, arm, seed and options) is written to ``--results`` and not run again, so that a
later call goes on. ``--table`` prints all of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from babylon.core.learning_settings import PreferenceSettings
from babylon.core.settings import TrainingSettings
from babylon.core.settings_loading import load_settings
from babylon.evaluation.arena.confidence import paired_difference
from babylon.evaluation.arena.play import Floats, Plays, best_rule
from babylon.game.market.levels import LEVELS
from babylon.ops.demo import RECIPE
from babylon.training.base_model import RECIPES, make_embedded_model
from benchmarks.curriculum.hours import LOOK_WORLDS, learn, look, reader, taught, unseen
from benchmarks.curriculum.results import RunKey, RunResult, all_stored, store, stored, table

ARMS = ("ours", "reinforce", "sft", "ppo", "population")
FOUNDERS = (5e-4, 1e-4, 2e-3, 5e-6)  # the demo's rate, two others, and one that learns nothing
REINFORCE = {"loss": "reinforce_is", "credit": "trajectory", "iterations": "1"}
OF_PREFERENCES = "preferences."  # settings of that group, in --set
SHORT_PROMPT = ("L0", "L5")  # levels of the starter's prompt
PPO_LOOKS = 8
READER_SEED = 1000


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    if options.reader:
        made = reader(
            LEVELS[options.level],
            options.base or _embedded(options.level, load_settings().home.models),
            seed=READER_SEED,
            hours=options.hours,
            agents=options.agents,
            directory=options.reader,
        )
        print(made)
        return
    if not options.table:
        models = load_settings().home.models
        for seed in options.seeds:
            base = options.base or _embedded(options.level, models)
            key = RunKey(
                level=options.level,
                arm=options.arm,
                seed=seed,
                hours=options.hours,
                agents=options.agents,
                worlds=options.worlds,
                base=base.name,
                settings=tuple(sorted(options.set)),
            )
            if stored(options.results, key) is None:
                store(options.results, run(key, base, options.look))
    print("\n".join(table(all_stored(options.results))))


def run(key: RunKey, base: Path, looks: Sequence[int]) -> RunResult:
    """Run one arm of a level with one seed."""
    level, last = LEVELS[key.level], key.hours - 1
    decisions = sum(level.rules(hour).ticks for hour in range(key.hours)) * key.agents
    began = time.process_time()
    curve: list[object] = []
    with TemporaryDirectory() as directory:
        place = Path(directory)
        if key.arm == "ppo":
            decisions, curve, pnl, malformed = _ppo(key)
            cpu_s = time.process_time() - began
        else:
            policy = base
            if key.arm == "sft":
                policy = taught(
                    level,
                    base,
                    seed=key.seed,
                    hours=key.hours,
                    agents=key.agents,
                    directory=place,
                )
            else:
                changed = dict(pair.split("=", 1) for pair in key.settings)
                asked = {
                    n[len(OF_PREFERENCES) :]: changed.pop(n)
                    for n in [*changed]
                    if n.startswith(OF_PREFERENCES)
                }
                recipe = RECIPE["training"] | (REINFORCE if key.arm == "reinforce" else {})
                for row, policy in learn(  # noqa: B007
                    level,
                    base,
                    TrainingSettings.model_validate(recipe | changed),
                    seed=key.seed,
                    hours=key.hours,
                    agents=key.agents,
                    looks=looks,
                    directory=place,
                    asked=PreferenceSettings.model_validate(asked),
                    rates=FOUNDERS if key.arm == "population" else (),
                ):
                    print(json.dumps(asdict(row)), flush=True)
                    curve.append(asdict(row))
            cpu_s = time.process_time() - began
            end = look(level, last, policy, key.worlds)
            pnl, malformed = end.pnl, float(end.malformed.mean())
    started = look(level, last, base, key.worlds)
    return _compared(key, pnl, malformed, started, decisions, cpu_s, curve)


def _compared(
    key: RunKey,
    pnl: Floats,
    malformed: float,
    started: Plays,
    decisions: int,
    cpu_s: float,
    curve: Sequence[object],
) -> RunResult:
    rule, best = best_rule(unseen(LEVELS[key.level], key.hours - 1, key.worlds))
    gain, beside = paired_difference(started.pnl, pnl), paired_difference(best.pnl, pnl)
    return RunResult(
        key=key,
        pnl=float(pnl.mean()),
        malformed=malformed,
        base_pnl=started.mean_pnl,
        rule=rule,
        rule_pnl=best.mean_pnl,
        gain=(gain.mean, gain.low, gain.high),
        beside=(beside.mean, beside.low, beside.high),
        decisions=decisions,
        cpu_s=cpu_s,
        curve=tuple(curve),
    )


def _ppo(key: RunKey) -> tuple[int, list[object], Floats, float]:
    """Train PPO with a hundred times the decisions of the other arms, of the last hour's rules."""
    from benchmarks.curriculum import ppo

    level, last = LEVELS[key.level], key.hours - 1
    rules, worlds = level.rules(last), unseen(level, last, key.worlds)
    budget = 100 * rules.ticks * key.agents * key.hours
    curve: list[object] = []
    for done, trader in ppo.train(rules, key.seed, budget):
        if done * PPO_LOOKS >= budget * (len(curve) + 1) or done >= budget:
            curve.append([done, float(np.mean(ppo.pnl(trader, worlds)))])
            print(json.dumps(curve[-1]), flush=True)
    return done, curve, np.array(ppo.pnl(trader, worlds)), 0.0


def _embedded(level: str, models: Path) -> Path:
    game = "starter" if level in SHORT_PROMPT else "hour"
    return make_embedded_model(RECIPES[game](0), models)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--level", choices=[*LEVELS], default="L0")
    parser.add_argument("--arm", choices=ARMS, default="ours")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--worlds", type=int, default=LOOK_WORLDS)
    parser.add_argument("--look", type=int, nargs="*", default=[])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--reader", type=Path, metavar="DIRECTORY")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/curriculum"))
    parser.add_argument("--table", action="store_true", help="Run nothing; print what was run.")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Learning on the levels of the curriculum, beside its baselines.

    python -m benchmarks.curriculum [--level L0] [--arm ours] [--seeds 0 1] [--hours 8]
        [--agents 64] [--first 0] [--base CHECKPOINT] [--keep CHECKPOINT]
        [--set credit=trajectory preferences.nll=0.2 ...] [--new-words]
    python -m benchmarks.curriculum --table | --stability | --figures DIRECTORY
    python -m benchmarks.curriculum --reader DIRECTORY      make a base model that reads words

Arms: ``ours``, the demo's recipe; ``gated``, the same with the arena's gate; ``reinforce``, the
same hours with one pass of REINFORCE on whole trajectories; ``trl``, the same hours trained by
TRL's GRPOTrainer (in ``.venv-bench``); ``sft``, the base model taught the best of its own
plays; ``ppo``, PPO from scratch on the Gymnasium view, which sees features (``--set
decisions=24576`` sets how many); ``base``, the base model as it is. All are compared with the base
model and the best scripted rule on the same unseen worlds. ``population``: siblings with the
learning rates of ``FOUNDERS`` in every hour, of which the fittest goes on; the arms to compare are
``ours`` with each of them.

Each run (level, arm, seed and options) becomes a line in ``--results`` and is not run again. One
that was stopped goes on after its last hour. ``--stability`` prints how every run of ``ours`` kept
what it had learned, finished or not; ``--figures`` draws one figure a level.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from babylon.core.learning_settings import PreferenceSettings, TrainingSettings
from babylon.core.settings_loading import load_settings
from babylon.evaluation.arena.confidence import paired_difference
from babylon.evaluation.arena.play import Floats, Plays, best_rule
from babylon.game.market.levels import LEVELS
from babylon.ops.demo import training_recipe
from babylon.training.base_model import RECIPES, make_embedded_model
from benchmarks.curriculum.hours import Hour, Update, learn, taught
from benchmarks.curriculum.play import LOOK_WORLDS, look, seats_of, unseen
from benchmarks.curriculum.population import population_update
from benchmarks.curriculum.reader import reader
from benchmarks.curriculum.results import (
    RunKey,
    RunResult,
    differences,
    store,
    stored,
    table,
)
from benchmarks.curriculum.stability import stability
from benchmarks.curriculum.updates import gated_update, own_update

ARMS = ("ours", "gated", "reinforce", "trl", "sft", "ppo", "base", "population")
REINFORCE = {"loss": "reinforce_is", "credit": "trajectory", "iterations": "1"}
OF_PREFERENCES = "preferences."  # settings of that group, in --set
READER_SEED = 1000
SHORT_PROMPT = ("L0", "L5")  # levels of the starter's prompt
PPO_LOOKS = 8
LARGE = ("pairs", "wealth")  # of an hour; no result needs them


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    if options.stability:
        print("\n".join(stability(options.results)))
        return
    if options.figures:
        from benchmarks.curriculum.figures import draw

        print(*draw([*stored(options.results).values()], options.figures), sep="\n")
        return
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
                first=options.first,
                agents=options.agents,
                worlds=options.worlds,
                base=base.name,
                settings=tuple(sorted(options.set)),
            )
            if key not in stored(options.results):
                place = options.results / "unfinished" / key.name
                place.mkdir(parents=True, exist_ok=True)
                result, policy = run(key, base, options.look, place)
                if options.new_words and key.arm != "ppo":  # PPO sees features
                    result = replace(result, new_words=_in_new_words(key, base, policy))
                if options.keep:
                    shutil.copytree(policy, options.keep)
                store(options.results, result)
                shutil.rmtree(place)
    results = stored(options.results).values()
    print("\n".join([*table(results), "", *differences(results)]))


def run(key: RunKey, base: Path, looks: Sequence[int], place: Path) -> tuple[RunResult, Path]:
    """Run one arm of a level with one seed → (result, policy; the base model for PPO).

    ``place`` holds what it has done so far.
    """
    level, last = LEVELS[key.level], key.last
    decisions = sum(level.rules(hour).ticks for hour in range(key.first, last + 1)) * key.agents
    started = _of_base(key.level, last, base, key.worlds)
    began, policy = time.process_time(), base
    curve: list[object] = []
    if key.arm == "ppo":
        decisions, curve, pnl, malformed = _ppo(key)
        cpu_s = time.process_time() - began
    else:
        if key.arm == "base":
            decisions, cpu_s = 0, 0.0
        elif key.arm == "sft":
            policy = taught(
                level, base, seed=key.seed, hours=key.hours, agents=key.agents, directory=place
            )
            cpu_s = time.process_time() - began
        else:
            hours, cpu_s = _learner(key, base, looks, place), 0.0
            for row, policy in hours:  # noqa: B007
                print(json.dumps(asdict(row)), flush=True)
                curve.append(
                    {name: value for name, value in asdict(row).items() if name not in LARGE}
                )
                cpu_s += row.cpu_s
        end = started if policy == base else look(level, last, policy, key.worlds)
        pnl, malformed = end.pnl, float(end.malformed.mean())
    return _compared(key, pnl, malformed, started, decisions, cpu_s, curve), policy


def _learner(
    key: RunKey, base: Path, looks: Sequence[int], place: Path
) -> Iterator[tuple[Hour, Path]]:
    """The hours of an arm that learns by reinforcement."""
    level = LEVELS[key.level]
    changed = dict(pair.split("=", 1) for pair in key.settings)
    asked = PreferenceSettings.model_validate(
        {
            name.removeprefix(OF_PREFERENCES): changed.pop(name)
            for name in [*changed]
            if name.startswith(OF_PREFERENCES)
        }
    )
    updates = {"gated": gated_update, "population": population_update}
    update: Update = partial(updates.get(key.arm, own_update), asked=asked)
    if key.arm == "trl":
        from benchmarks.curriculum.trl_update import trl_update

        update = trl_update
    recipe = training_recipe(level.rules(0)) | (REINFORCE if key.arm == "reinforce" else {})
    return learn(
        level,
        base,
        TrainingSettings.model_validate(recipe | changed),
        seed=key.seed,
        hours=key.hours,
        first=key.first,
        agents=key.agents,
        looks=looks,
        directory=place,
        update=update,
    )


def _compared(
    key: RunKey,
    pnl: Floats,
    malformed: float,
    started: Plays,
    decisions: int,
    cpu_s: float,
    curve: Sequence[object],
) -> RunResult:
    level = LEVELS[key.level]
    rule, best = best_rule(unseen(level, key.last, key.worlds), seats_of(level))
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
        by_world=tuple(np.round(pnl, 2).tolist()),
    )


def _in_new_words(key: RunKey, base: Path, policy: Path) -> tuple[float, float]:
    """Return the mean P&L of policy and base where headlines have words that nobody knows."""
    before = _of_base(key.level, key.last, base, key.worlds, new_words=True)
    own = look(LEVELS[key.level], key.last, policy, key.worlds, new_words=True)
    return own.mean_pnl, before.mean_pnl


@cache  # for all seeds
def _of_base(level: str, hour: int, base: Path, worlds: int, *, new_words: bool = False) -> Plays:
    return look(LEVELS[level], hour, base, worlds, new_words=new_words)


def _ppo(key: RunKey) -> tuple[int, list[object], Floats, float]:
    """Train PPO on the last hour's rules: 100 times the others' decisions, or as many as set."""
    from benchmarks.curriculum import ppo

    level, last = LEVELS[key.level], key.last
    rules, worlds = level.rules(last), unseen(level, last, key.worlds)
    changed = dict(pair.split("=", 1) for pair in key.settings)
    budget = int(changed.get("decisions", 100 * rules.ticks * key.agents * key.hours))
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
    parser.add_argument("--first", type=int, default=0, help="First hour of the level.")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--keep", type=Path, help="Directory for the last policy.")
    parser.add_argument("--reader", type=Path, metavar="DIRECTORY", help="Make such a base there.")
    parser.add_argument("--new-words", action="store_true", help="Look at new headlines too.")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/curriculum"))
    parser.add_argument("--table", action="store_true", help="Run nothing; print what was run.")
    parser.add_argument("--stability", action="store_true", help="Print what became of each loss.")
    parser.add_argument("--figures", type=Path, metavar="DIRECTORY", help="Draw what was run.")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Numeric baselines beside the oracle, the scripted rules and chance, on the demo's last worlds.

    python -m benchmarks.baselines [ALGORITHM ...] [--rules starter] [--seed 1] [--worlds 512]
        [--generations 4] [--population 1] [--steps N] [--home DIRECTORY]

Each algorithm is trained, exported and loaded again as the arena does it. ``--seed`` is the demo's,
so an LLM's final P&L of ``babylon demo --seed 1`` stands beside these figures. ``cqn`` learns from
play of the scripted mixture that also teaches the demo's base model, recorded as replies. Needs
``babylon-rl[agilerl]``.
"""

import argparse
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from babylon.evaluation.arena.confidence import mean_interval
from babylon.evaluation.arena.play import Decide, play, scripted
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.evaluation.rebuild.transitions import transitions_of
from babylon.game.envs.numeric_play import numeric_decisions
from babylon.game.market.game import Game
from babylon.game.market.orders import render_decision
from babylon.game.market.scenario import PRESETS, Rules, Scenario, make_scenario
from babylon.game.market.scripted import RULES, SCRIPTED_AGENTS
from babylon.game.market.transcripts import draw_agent
from babylon.training.baselines.algorithms import ALGORITHMS
from babylon.training.baselines.train import POLICY, BaselineRun, train_baseline
from babylon.training.baselines.transitions import Transitions

RECORDED_TICKS = 6_000


def recorded_mixture(rules: Rules, seed: int) -> Transitions:
    """Play the scripted mixture, and return its replies as transitions."""
    random = Random(f"baselines:{seed}")
    found = []
    for number in range(RECORDED_TICKS // rules.ticks):
        game = Game(make_scenario(f"baselines:{seed}:{number}", rules), "agent-0")
        _, agent = draw_agent(random, rules)
        replies = []
        while not game.over:
            decision = agent(game, random)
            replies.append(render_decision(decision))
            game.act(decision)
        one = RecordedPlay(
            trajectory_id=str(number),
            agent_id="agent-0",
            replies=tuple(replies),
            pnl_usd=game.settle(),
        )
        found.append(RecordedScenario(window_id="mixture", scenario=game.scenario, plays=(one,)))
    return transitions_of(found, rules)


def row(name: str, decide: Decide, worlds: list[Scenario], seconds: float | None = None) -> None:
    """Play the worlds and print a row of the table."""
    plays = play(decide, worlds)
    mean = mean_interval(plays.pnl)
    cost = "" if seconds is None else f"{seconds:.0f}"
    ends = f"[{mean.low:.0f}, {mean.high:.0f}]"
    print(f"| {name} | {mean.mean:.0f} | {ends} | {plays.tail:.0f} | {cost} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", default=[*ALGORITHMS])
    parser.add_argument("--rules", choices=PRESETS, default="starter")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", type=int, default=512)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--population", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--home", type=Path)
    options = parser.parse_args()
    rules = PRESETS[options.rules]
    worlds = unseen_scenarios("final", str(options.seed), options.worlds, rules)
    print("| player | mean P&L, $ | 95 % interval | worst 5 % | CPU seconds |")
    print("| --- | ---: | ---: | ---: | ---: |")
    others = {"oracle": SCRIPTED_AGENTS["oracle"], **RULES, "random": SCRIPTED_AGENTS["random"]}
    for name, agent in others.items():
        row(name, scripted(agent), worlds)
    with TemporaryDirectory() as temporary:
        for name in options.algorithms:
            started = time.process_time()
            directory = (options.home or Path(temporary)) / f"{name}-{options.rules}"
            run = BaselineRun(
                algorithm=name,
                rules=options.rules,
                population=options.population,
                seed=options.seed,
                steps=options.steps,
            )
            # Only offline algorithms learn from the mixture; the others play by themselves.
            offline = ALGORITHMS[name].view == "recorded"
            recorded = recorded_mixture(rules, options.seed) if offline else None
            members = train_baseline(directory, run, options.generations, recorded)
            seconds = time.process_time() - started
            label = f"{name}, {max(one.steps for one in members):,} steps"
            row(label, numeric_decisions(directory / POLICY), worlds, seconds)


if __name__ == "__main__":
    main()

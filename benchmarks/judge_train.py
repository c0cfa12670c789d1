"""Agreement with outcomes of a judge that was trained here, on windows of the simulator.

    python -m benchmarks.judge_train [--windows 200] [--size 8] [--epochs 6] [--rounds 2] [--seed 0]
        [--json]

The embedded model learns from the earlier 80 % of the windows (``babylon.stages.train_judge``) by a
rubric of one sentence. On the later ones its agreement with the realised profit stands beside
the heuristic's, a random judge's, and that of a loopback judge with known noise as served judge.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from babylon.core.learning_settings import TrainingSettings
from babylon.scoring.judge.judge_client import JudgeClient
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import JudgeConfig, Rubric
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from babylon.scoring.judge.reported_validity import TrainedJudge
from babylon.scoring.judge.validity import JudgedGroup
from babylon.stages.train_judge import (
    JudgeTraining,
    OutcomeWindow,
    split_by_time,
    train_and_compare,
)
from babylon.training.base_model import resolve_base
from babylon.training.update_options import trainer_config
from benchmarks.judge_windows import known_window
from benchmarks.loopback_judge import LoopbackJudge, Mind

CONFIG = JudgeConfig(
    rubric=Rubric(name="profit", text="Score the realised profit."),
    context_tokens=300,  # prompts of about 250 of the model's tokens
)
SERVED = "served: noise of 20 % of the range"


async def served(windows: list[OutcomeWindow]) -> dict[str, list[JudgedGroup]]:
    """Return the opinions of the loopback judge, by window."""
    groups, in_lists = {}, JudgeConfig(rubric=CONFIG.rubric)
    for number, window in enumerate(windows):
        profits = [one.trajectory.pnl_usd for one in window.judged]
        mind = Mind(noise=0.2, scale=(min(profits), max(profits)), seed=number)
        async with (
            LoopbackJudge(mind) as judge,
            JudgeClient(model="loopback", base_url=judge.base_url) as client,
        ):
            found = await judge_window(
                client, window.judged, window.truth, in_lists, ledger=MemoryJudgments()
            )
        groups[window.window_id] = list(found.groups)
    return groups


def outcome_window(size: int, seed: int) -> OutcomeWindow:
    """Return a window of the simulator whose trajectories have names of their own."""
    known, name = known_window(size, seed), f"{seed:04}"
    judged = []
    for one in known.judged:
        unique = f"{name}-{one.trajectory.trajectory_id}"
        trajectory = msgspec.structs.replace(one.trajectory, trajectory_id=unique)
        judged.append(replace(one, trajectory=trajectory))
    return OutcomeWindow(window_id=name, judged=tuple(judged), truth=known.truth)


async def measure(options: argparse.Namespace, directory: Path) -> TrainedJudge:
    """Train, and compare on the later windows."""
    first = options.seed * options.windows  # each seed has windows of its own
    windows = [outcome_window(options.size, first + number) for number in range(options.windows)]
    training = JudgeTraining(
        later=options.later,
        epochs=options.epochs,
        rounds=options.rounds,
        tuning=options.tuning,
        seed=options.seed,
    )
    _, late = split_by_time(windows, training.later)
    base = resolve_base(None, options.models or directory, 0)
    return await train_and_compare(
        base,
        windows,
        directory / "judge",
        CONFIG,
        trainer_config(TrainingSettings(), options.seed),
        training,
        directory / "judge.log",
        {SERVED: await served(late)},
        lambda line: print(line, file=sys.stderr, flush=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--later", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuning", choices=("full", "lora"), default="full")
    parser.add_argument("--models", type=Path, help="keeps the embedded model")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(options, Path(directory)))
    if options.json:
        print(json.dumps(asdict(found)))
        return
    print(f"loss {found.first_loss:.3f} to {found.last_loss:.3f}")
    print("rewards", *(f"{reward:.3f}" for reward in found.rewards))
    print("| judge | plays | agreement | 95 % interval |\n| --- | --- | --- | --- |")
    for one in found.contenders:
        if (agreed := one.agreement) is not None:
            interval = f"{agreed.low:.2f} to {agreed.high:.2f}"
            print(f"| {one.name} | {one.judged} | {agreed.correlation:.2f} | {interval} |")


if __name__ == "__main__":
    main()

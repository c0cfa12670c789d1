"""One hour's update by TRL's GRPOTrainer, on the same logged calls. Runs in ``.venv-bench``.

TRL's generation is replaced by the recorded calls, with their logprobs, and its advantages are its
own: the score of a whole play, relative to its world's, divided by their deviation. Loss, clip and
optimiser are TRL's defaults. Learning rate, passes over the hour and decisions of a train step are
the recipe's. The gradient of a step is summed over micro-batches, and the head sees completion
positions only: the same sum, three times as fast on a CPU.
"""

from math import gcd
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
from datasets import Dataset
from trl import GRPOConfig

from babylon.core.learning_settings import TrainingSettings
from babylon.core.trajectories import TrainingRow
from babylon.ops.demo import STEP_DECISIONS
from babylon.policies.load import load_policy
from benchmarks.curriculum.hours import Moved, Window
from benchmarks.trainer.cases import Call
from benchmarks.trainer.cases import Window as LoggedWindow
from benchmarks.trainer.contenders.trl_session import HeadTrainer, no_reward

EPSILON = 1e-4  # added to the deviation of a group, as TRL does
MICRO_BATCH = 4  # calls; the fastest of 4, 8 and 96 on a CPU


def trl_update(window: Window, training: TrainingSettings, target: Path) -> Moved:
    """Train the window's policy. TRL reports neither divergence nor entropy here."""
    model, tokenizer = load_policy(window.policy)
    calls = _calls(window)
    steps = max(1, len(calls) // STEP_DECISIONS)
    calls = calls[: len(calls) // steps * steps]  # TRL needs steps of equal size
    micro_batch = gcd(len(calls) // steps, MICRO_BATCH)
    trainer = HeadTrainer(
        model=model,
        reward_funcs=no_reward,
        args=GRPOConfig(
            output_dir=str(target.parent / "trl"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=len(calls) // steps // micro_batch,
            steps_per_generation=len(calls) // micro_batch,
            num_iterations=training.iterations,
            max_steps=steps * training.iterations,
            num_generations=2,
            learning_rate=training.learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=window.seed,
        ),
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(calls))]}),
        processing_class=tokenizer,
    )
    trainer.window = LoggedWindow(name=window.level.name, calls=calls)
    trainer.train()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return Moved()


def _calls(window: Window) -> list[Call]:
    scores: dict[str, list[float]] = {}
    for row in window.rows:
        scores.setdefault(row.scenario_id, []).append(row.score)
    return [
        Call(
            prompt=np.array(call.prompt_token_ids),
            completion=np.array(call.completion_token_ids),
            mu=np.array(call.logprobs, dtype=np.float32),
            advantage=_advantage(row, scores[row.scenario_id]),
        )
        for row in window.rows
        for call in row.calls
    ]


def _advantage(row: TrainingRow, group: list[float]) -> float:
    return (row.score - fmean(group)) / (pstdev(group) + EPSILON)

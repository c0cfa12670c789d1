"""``python -m benchmarks.preferences``: DPO and KTO beside TRL's trainers, on the same replies.

The prompts are those of ``benchmarks.trainer``'s case ``high``: 256 tokens that all share, 640 that
the agents of a tick share, 96 of their own. Each has two replies of 40 tokens. One optimiser step
over all of them is timed, with the reference's pass, in seconds of the processor; TRL takes the
micro-batch that is fastest for it, and ``--repeats`` are alternated. Both take a plain gradient
step first, so that their gradients can be compared. Run it in ``.venv-bench``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens
from babylon.training.preferences.config import PreferenceConfig
from babylon.training.preferences.examples import Examples, Unit, paired_examples
from babylon.training.preferences.trainer import train_on_preferences
from benchmarks.trainer.models import MODELS, build_model

SYSTEM, MARKET, PRIVATE, REPLY = 256, 640, 96, 40  # tokens
SIZES = (2, 4, 8)  # TRL's micro-batches
RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Prompts with two replies each, the better one first."""

    prompts: Sequence[PromptReplies]
    kind: str  # dpo or kto

    @property
    def tokens(self) -> int:
        """Number of trained tokens."""
        return sum(len(r.completion_token_ids) for p in self.prompts for r in p.replies)

    def examples(self) -> Examples:
        """The same replies for our trainer."""
        if self.kind == "dpo":
            return paired_examples(self.prompts, 0.0, 8192)
        calls: list[CallTokens] = []
        units: list[Unit] = []
        for prompt in self.prompts:
            for reply, label in zip(prompt.replies, (1, -1), strict=True):
                place = len(calls)
                calls.append(
                    CallTokens(
                        prompt=prompt.prompt_token_ids,
                        completion=reply.completion_token_ids,
                        logprobs=None,
                    )
                )
                name = f"{prompt.trajectory_id}/{label}"
                units.append(Unit(trajectory_id=name, calls=(place,), labels=(label,)))
        return Examples(calls=calls, tree=compile_tree(calls), units=units)

    def rows(self) -> list[dict[str, Any]]:
        """The same replies as TRL's collators read them."""
        if self.kind == "dpo":
            return [
                {
                    "prompt_ids": list(p.prompt_token_ids),
                    "chosen_ids": list(p.replies[0].completion_token_ids),
                    "rejected_ids": list(p.replies[1].completion_token_ids),
                }
                for p in self.prompts
            ]
        return [
            {
                "prompt_ids": list(p.prompt_token_ids),
                "completion_ids": list(reply.completion_token_ids),
                "label": label,
            }
            for p in self.prompts
            for reply, label in zip(p.replies, (True, False), strict=True)
        ]


def made(kind: str, agents: int, ticks: int, seed: int) -> Case:
    random = Random(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(random.randrange(2, 4096) for _ in range(count))

    system, prompts = some(SYSTEM), []
    for tick in range(ticks):
        market = some(MARKET)
        for agent in range(agents):
            prompts.append(
                PromptReplies(
                    trajectory_id=f"{tick}-{agent}",
                    step=tick,
                    prompt_token_ids=system + market + some(PRIVATE),
                    replies=tuple(
                        ValuedReply(completion_token_ids=some(REPLY), value=value)
                        for value in (1.0, 0.0)
                    ),
                    temperature=1.0,
                    policy_version=0,
                )
            )
    return Case(prompts=prompts, kind=kind)


class _LoggedDpo(DPOTrainer):  # type: ignore[misc]
    """DPOTrainer on token ids that are known."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


class _LoggedKto(KTOTrainer):  # type: ignore[misc]
    """KTOTrainer on token ids that are known."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *_: Any) -> Any:
        def mismatched(rows: Any) -> Any:
            ids = rows["completion_ids"]
            return {"KL_completion_ids": [ids[-1], *ids[:-1]]}

        size = args.per_device_train_batch_size
        return dataset.map(mismatched, batched=True, batch_size=size)


def ours(case: Case, model: Any, optimizer: torch.optim.Optimizer) -> None:
    config = TrainerConfig(
        iterations=1,
        trajectories_per_step=10**6,
        learning_rate=RATE,
        warmup_steps=0,
        grad_clip=1e9,
        stop_kl=1e9,
    )
    train_on_preferences(model, optimizer, case.examples(), config, PreferenceConfig())


def trl_trainer(case: Case, model: Any, optimizer: torch.optim.Optimizer, size: int) -> Any:
    rows = case.rows()
    common: dict[str, Any] = {
        "output_dir": "unused",
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": len(rows) // size,
        "max_steps": 1,
        "beta": 0.1,
        "max_length": None,
        "max_grad_norm": 1e9,
        "lr_scheduler_type": "constant",
        "learning_rate": RATE,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    kind, config = (_LoggedDpo, DPOConfig) if case.kind == "dpo" else (_LoggedKto, KTOConfig)
    return kind(
        model=model,
        ref_model=deepcopy(model),
        args=config(**common),
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        optimizers=(optimizer, None),
    )


def _tokenizer() -> Any:
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer: Any = PreTrainedTokenizerFast
    return tokenizer(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _timed(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def compare(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Gradients of a small case, then the seconds of the whole one."""
    small = made(kind, 2, 1, options.seed)
    steps = []
    for run in ("ours", "trl"):
        model = build_model(MODELS["small"], options.seed)
        before = _weights(model)
        sgd = torch.optim.SGD(model.parameters(), lr=RATE)
        if run == "ours":
            ours(small, model, sgd)
        else:
            trl_trainer(small, model, sgd, len(small.rows())).train()
        steps.append(_weights(model) - before)
    error = float((steps[0] - steps[1]).norm() / steps[1].norm())
    case = made(kind, options.agents, options.ticks, options.seed)
    seconds: dict[str, list[float]] = {"babylon": [], "trl": []}
    size = _fastest(case, options)
    for _ in range(options.repeats):
        model = build_model(MODELS["small"], options.seed)
        adam = torch.optim.AdamW(model.parameters(), lr=RATE)
        seconds["babylon"].append(_timed(lambda m=model, o=adam: ours(case, m, o)))  # type: ignore[misc]
        model = build_model(MODELS["small"], options.seed)
        trainer = trl_trainer(case, model, torch.optim.AdamW(model.parameters(), lr=RATE), size)
        seconds["trl"].append(_timed(trainer.train))
        print(f"{kind}: {seconds}", file=sys.stderr, flush=True)
    rate = {name: case.tokens / median(values) for name, values in seconds.items()}
    ratios = np.array(seconds["trl"]) / np.array(seconds["babylon"])
    return {
        "objective": kind,
        "replies": 2 * len(case.prompts),
        "trained_tokens": case.tokens,
        "gradient_error": error,
        "trl_micro_batch": size,
        "trained_tokens_per_cpu_s": {name: round(value, 1) for name, value in rate.items()},
        "ratio": round(float(np.median(ratios)), 2),
        "ratio_min": round(float(ratios.min()), 2),
    }


def _fastest(case: Case, options: argparse.Namespace) -> int:
    """The micro-batch that TRL is fastest with, tried once on a tenth of the replies."""
    part = made(case.kind, options.agents, 1, options.seed)
    tried = {}
    for size in SIZES:
        if len(part.rows()) % size or len(case.rows()) % size:
            continue
        model = build_model(MODELS["small"], options.seed)
        adam = torch.optim.AdamW(model.parameters(), lr=RATE)
        tried[size] = _timed(trl_trainer(part, model, adam, size).train)
        print(f"{case.kind}: TRL by {size}: {tried[size]:.1f} CPU s", file=sys.stderr, flush=True)
    return min(tried, key=tried.__getitem__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.preferences", description=__doc__)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--ticks", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--objective", choices=("dpo", "kto"), nargs="+", default=["dpo", "kto"])
    options = parser.parse_args()
    for kind in options.objective:
        print(json.dumps(compare(kind, options)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

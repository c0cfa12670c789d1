"""TRL's GRPOTrainer on logged calls, in four variants.

Unmodified, it pads the whole window to its longest prompt and its longest completion, shuffles it,
and on CPU its fused head scores every position. ``buckets``: micro-batches of calls of
similar length, each padded to its own longest. ``head``: the head sees completion positions only,
as in TRL's versions before the fused head. One optimiser step is the whole window: its calls are
the generation that ``steps_per_generation`` micro-batches share. Gradient checkpointing, on by
default, is off: it runs the forward pass twice to save memory, which is not needed here.
``dapo``, the default loss, is the token mean over the window.
"""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from benchmarks.trainer.cases import Call, Window
from benchmarks.trainer.contenders import Session, Task
from benchmarks.trainer.contenders.local import LocalSession, policy
from benchmarks.trainer.contenders.padded import by_length, chunks, deal, left_padded
from benchmarks.trainer.flops import NOTHING, Work, flop, rows_work
from benchmarks.trainer.models import shape_of


class LoggedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose generations are the window's calls."""

    window: Window
    _buffered_inputs: Any

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return self.batch(self.window.calls)

    def batch(self, calls: Sequence[Call]) -> dict[str, Tensor]:
        padded = left_padded(calls)
        fields = {
            "prompt_ids": padded.prompt_ids,
            "prompt_mask": padded.prompt_mask,
            "completion_ids": padded.completion_ids,
            "completion_mask": padded.completion_mask,
            "advantages": padded.advantages,
            "num_items_in_batch": torch.tensor(float(self.window.trained_tokens)),
        }
        fields |= {} if padded.mu is None else {"old_per_token_logps": padded.mu}
        return {name: tensor.to(self.accelerator.device) for name, tensor in fields.items()}


class BucketedTrainer(LoggedTrainer):
    """Micro-batches of calls of similar length, each padded to its own longest."""

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Tensor]:
        if self._buffered_inputs is None:
            size = self.args.per_device_train_batch_size
            self._buffered_inputs = [
                self.batch(part) for part in chunks(by_length(self.window.calls), size)
            ]
        inputs: dict[str, Tensor] = self._buffered_inputs[
            self._step % self.args.steps_per_generation
        ]
        return inputs


class CompletionHead:
    """The head at completion positions only."""

    temperature: float

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **_: Any,
    ) -> tuple[Tensor, Tensor, None]:
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=logits_to_keep + 1,
            use_cache=False,
        ).logits[:, :-1]
        logits = logits / self.temperature
        logprobs = selective_log_softmax(logits, input_ids[:, -logits_to_keep:])
        with torch.no_grad():
            entropies = entropy_from_logits(logits)
        return logprobs, entropies, None


class HeadTrainer(CompletionHead, LoggedTrainer):
    """Unmodified except for the head."""


class BucketedHeadTrainer(CompletionHead, BucketedTrainer):
    """Both changes."""


TRAINERS: dict[str, type[LoggedTrainer]] = {
    "": LoggedTrainer,
    "buckets": BucketedTrainer,
    "head": HeadTrainer,
    "head buckets": BucketedHeadTrainer,
}


class TrlSession(LocalSession):
    """``training_step`` a micro-batch, then our own clip and step, which are those of Trainer."""

    def __init__(self, task: Task, variant: str) -> None:
        super().__init__(policy(task), task)
        calls = task.window.calls
        self.steps = len(calls) // task.micro_batch
        if self.steps * task.micro_batch != len(calls):
            raise ValueError(
                f"micro-batches of {task.micro_batch} do not divide {len(calls)} calls"
            )
        self.trainer = logged_trainer(
            self.model,
            self.optimizer,
            task.window,
            variant,
            steps=self.steps,
            max_grad_norm=task.grad_clip,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=task.seed,
        )
        ordered = by_length(calls) if "buckets" in variant else calls
        size = task.micro_batch if "buckets" in variant else len(calls)
        padded = [_padded_to(part) for part in chunks(ordered, size) for _ in part]
        works = [
            sum((rows_work([w], t if "head" in variant else w - 1) for w, t in group), NOTHING)
            for group in chunks(padded, task.micro_batch)
        ]
        self.work: Work = sum(works, NOTHING)
        shape = shape_of(task.config)
        costs = [flop(shape, work, task.tuning) for work in works]
        self.parts = deal(works, task.parts)
        self.shares = [sum(costs[step] for step in part) / sum(costs) for part in self.parts]

    def accumulate(self, part: int) -> None:
        trainer = self.trainer
        for step in self.parts[part]:
            trainer._step = self.steps + step  # at 0 it would generate, that is shuffle, anew
            trainer.training_step(trainer.model, trainer.window.calls, None)


def _padded_to(calls: Sequence[Call]) -> tuple[int, int]:
    """Tokens and completion positions of a row."""
    prompt = max(len(call.prompt) for call in calls)
    completion = max(len(call.completion) for call in calls)
    return prompt + completion, completion


def logged_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window,
    variant: str = "",
    *,
    steps: int,
    **arguments: Any,
) -> LoggedTrainer:
    """Return a trainer whose generation is the window, in ``steps`` micro-batches."""
    config = GRPOConfig(
        output_dir="unused",
        per_device_train_batch_size=len(window.calls) // steps,
        gradient_accumulation_steps=steps,
        steps_per_generation=steps,
        num_iterations=10,
        num_generations=2,
        beta=0.0,
        temperature=1.0,
        report_to=[],
        save_strategy="no",
        **arguments,
    )
    trainer = TRAINERS[variant](
        model=model,
        reward_funcs=no_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(window.calls))]}),
        processing_class=_tokenizer(),
        optimizers=(optimizer, None),
    )
    trainer.window = window
    trainer.current_gradient_accumulation_steps = steps
    return trainer


def no_reward(completions: Sequence[object], **_: object) -> list[float]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    """A tokenizer that TRL's trainer requires. No text is tokenised."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer: Any = PreTrainedTokenizerFast
    return tokenizer(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def open_session(task: Task, variant: str) -> Session:
    return TrlSession(task, variant)

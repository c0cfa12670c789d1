"""Checkpoints as the trainer writes them: two full models, and adapters on the first of them."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from babylon.policies.load import load_policy
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens
from babylon.training.trainable import load_trainable, save_checkpoint
from tests.tiny_policy import tiny_model, tiny_tokenizer

CONTEXT, END = 512, 258


@dataclass(frozen=True)
class Checkpoints:
    base: Path
    other_base: Path
    adapters: tuple[Path, ...]


def make_checkpoints(root: Path) -> Checkpoints:
    base = _full_model(root / "base", seed=0)
    return Checkpoints(
        base=base,
        other_base=_full_model(root / "other-base", seed=1),
        adapters=tuple(_adapter(base, root / f"adapter-{seed}", seed) for seed in range(4)),
    )


def trainer_logprobs(
    path: Path, prompt: list[int], completion: list[int], temperature: float
) -> torch.Tensor:
    """``[T]``, by the forward pass that training uses."""
    call = CallTokens(prompt=prompt, completion=completion, logprobs=None, temperature=temperature)
    values = PolicyForward(_policy(path)).logprobs(compile_tree([call]))
    return values.logprobs.double()


@cache
def _policy(path: Path) -> PreTrainedModel:
    return load_policy(path)[0]


def _full_model(path: Path, seed: int) -> Path:
    """Of a shape that vLLM's CPU attention takes, and with answers that end now and then. An
    engine that made the model's sampling defaults its own would sample from three tokens."""
    model = tiny_model(
        seed,
        max_position_embeddings=CONTEXT,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    model.lm_head.weight.data[END] *= 2
    assert model.generation_config is not None
    model.generation_config.update(do_sample=True, top_k=3, temperature=0.5)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def _adapter(base: Path, path: Path, seed: int) -> Path:
    """A LoRA checkpoint that answers clearly otherwise than its base and its sisters."""
    trainable = load_trainable(base, "lora", learning_rate=1e-3)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainable.tuned.items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return save_checkpoint(trainable, path)

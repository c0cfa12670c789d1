"""Policies with random weights on disk, and windows of random tokens for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import get_peft_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from babylon.core.learning_settings import Precision
from babylon.core.trajectories import Call, TrainingRow
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import CHAT_TEMPLATE, END, PAD, START
from benchmarks.trainer.cases import AGENTS, Window, make_window
from benchmarks.trainer.models import (
    GPU_MODELS,
    Tuning,
    build_model,
    lora_config,
    qwen3,
    seed_adapter,
)

Size = Literal["0.5b", "7b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKind:
    """A model, the way it is tuned, and the precision of its frozen weights."""

    config: PreTrainedConfig
    tuning: Tuning
    precision: Precision


def policy_kind(size: Size, *, rehearse: bool) -> PolicyKind:
    """Return the policy of a size; the rehearsal's are tiny."""
    if rehearse:
        config = qwen3(64, 2, vocab=512)
        return PolicyKind(
            config=config, tuning="full" if size == "0.5b" else "lora", precision="fp32"
        )
    if size == "0.5b":
        return PolicyKind(config=GPU_MODELS["qwen2.5-0.5b"], tuning="full", precision="fp32")
    return PolicyKind(config=GPU_MODELS["qwen2.5-7b"], tuning="lora", precision="bf16")


def save_policy(kind: PolicyKind, directory: Path) -> Path:
    """Write random weights and a tokenizer whose every token is text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if kind.precision == "fp32" else torch.bfloat16
    model = build_model(kind.config, 1, device=device, dtype=dtype)
    tokenizer = _tokenizer(int(kind.config.vocab_size))
    generation: Any = model.generation_config
    generation.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_adapter(base: Path, kind: PolicyKind, directory: Path) -> Path:
    """Write a LoRA adapter on ``base`` that changes its answers."""
    model, tokenizer = load_policy(base, precision=kind.precision)
    adapted = get_peft_model(model, lora_config())
    seed_adapter(adapted, 1)
    adapted.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def window_of(kind: PolicyKind, *, rehearse: bool) -> Window:
    """Return 120 calls of 4,256 tokens that share most of their text; the rehearsal has ten."""
    window = make_window("low" if rehearse else "long", vocab=_letters(kind), seed=1)
    return window.head(AGENTS) if rehearse else window


def training_rows(window: Window) -> list[TrainingRow]:
    """Return the window as an agent's trajectory each, with a call for each tick."""
    return [
        TrainingRow(
            trajectory_id=f"t{agent}",
            agent_id=f"a{agent}",
            scenario_id="s",
            score=window.calls[agent].advantage,
            calls=tuple(
                Call(
                    step=tick,
                    messages=(),
                    response="",
                    policy_version=0,
                    prompt_token_ids=tuple(call.prompt.tolist()),
                    completion_token_ids=tuple(call.completion.tolist()),
                    logprobs=() if call.mu is None else tuple(call.mu.tolist()),
                )
                for tick, call in enumerate(window.calls[agent::AGENTS])
            ),
        )
        for agent in range(AGENTS)
    ]


def _letters(kind: PolicyKind) -> int:
    return int(kind.config.vocab_size) - 3  # without the special tokens


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of ``size`` tokens. Text is encoded by bytes alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number:06}" for number in range(size - len(alphabet) - 3)]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )

"""Tiny models, and gradients of a window one call at a time, straight from the formula."""

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from babylon.policies.load import quiet_ranks
from babylon.training.grpo.training_input import CallTokens
from babylon.training.grpo.tree_forward import Values

VOCABULARY = 61
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, True),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, False),  # with biases on queries, keys and values
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, True),
}


def model_of(kind: str = "qwen3", *, lora: bool = False, **options: Any) -> Any:
    """Two layers, four heads on two key-value heads, tied embeddings but for qwen2."""
    torch.manual_seed(0)
    make, config, tied = KINDS[kind]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "qwen3":
        sizes["head_dim"] = 16
    model = make(config(**sizes | options))
    if kind == "qwen2":
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at birth
                torch.nn.init.normal_(parameter, std=0.3)
    return with_adapter(model, 0.1) if lora else model.eval()


def with_adapter(model: Any, std: float, config: LoraConfig | None = None) -> Any:
    with quiet_ranks():
        adapted = get_peft_model(model, config or LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # starts at zero, which would leave lora_A without gradient
            torch.nn.init.normal_(parameter, std=std)
    return adapted.eval()


def call(prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> CallTokens:
    return CallTokens(prompt=prompt, completion=completion, logprobs=None, temperature=temperature)


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def naive_logprobs(model: Any, one: CallTokens) -> Tensor:
    """``[T]``, by a forward pass over this call alone."""
    inputs = [*one.prompt, *one.completion][:-1]
    logits = model(input_ids=torch.tensor([inputs])).logits[0].float()
    logprobs = torch.log_softmax(logits / one.temperature, -1)
    start = len(one.prompt) - 1
    return torch.stack([logprobs[start + t, y] for t, y in enumerate(one.completion)])


class DecoupledLoss:
    """``-A sum_t min(pi_p / mu, 2) min(r, clip(r))`` with random A, mu and p, near theta."""

    def __init__(self, model: Any, calls: Sequence[CallTokens], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(like: Tensor, scale: float) -> Tensor:
            return scale * torch.randn(like.shape, generator=generator)

        self.advantages = torch.randn(len(calls), generator=generator).tolist()
        with torch.no_grad():
            theta = [naive_logprobs(model, one) for one in calls]
        self.proximal = [t + noise(t, 0.1) for t in theta]
        self.mu = [t + noise(t, 0.5) for t in theta]

    def of_call(self, index: int, theta: Tensor) -> Tensor:
        a, p = self.advantages[index], self.proximal[index]
        ratio = torch.exp(theta - p)
        weight = torch.exp(p - self.mu[index]).clamp(max=2.0)
        return -(weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)).sum()

    def __call__(self, calls: Sequence[int], values: Values) -> Tensor:
        lengths = [len(self.mu[index]) for index in calls]
        rows = zip(calls, values.logprobs, lengths, strict=True)
        return torch.stack([self.of_call(index, row[:n]) for index, row, n in rows]).sum()


def gradient(model: Any) -> Tensor:
    """Return the accumulated gradient, and clear it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    result = torch.cat([g.flatten().clone() for g in flat])
    model.zero_grad()
    return result


def naive_gradients(model: Any, calls: Sequence[CallTokens], loss: DecoupledLoss) -> list[Tensor]:
    """Of each call by itself."""
    gradients = []
    for index, one in enumerate(calls):
        loss.of_call(index, naive_logprobs(model, one)).backward()  # type: ignore[no-untyped-call]
        gradients.append(gradient(model))
    return gradients


def assert_same_gradient(ours: Tensor, reference: Tensor, most: float = 1e-5) -> None:
    """The bounds that the project promises; fp32 noise is about 2e-6."""
    ours, reference = ours.double(), reference.double()
    error = float((ours - reference).norm() / reference.norm())
    cosine = float(ours @ reference / (ours.norm() * reference.norm()))
    assert error <= most and cosine >= 0.99999, (error, cosine)

"""Log-probabilities of logged completions under a policy."""

from typing import Any

import torch
from torch import Tensor

from babylon.grpo.batch import CallBatch


def completion_logprobs(model: Any, batch: CallBatch) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy ``[C, T]`` of each completion token, at its logged temperature.

    Any causal LM of transformers, or a peft model around one. The head runs only at positions
    that predict a completion token of some call. Everything is fp32, on CUDA too: rounding logits
    to bf16 would move logprobs by more than a small update does. Padding lies on the right, where
    causal attention cannot see it, so no attention mask is needed.
    """
    steps = torch.arange(batch.targets.shape[1], device=batch.targets.device)
    positions = batch.starts[:, None] + steps  # [C, T]
    positions = torch.where(batch.mask, positions, batch.starts[:, None])
    needed, index = torch.unique(positions, return_inverse=True)
    logits = model(input_ids=batch.input_ids, logits_to_keep=needed, use_cache=False).logits
    logits = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
    logprobs = torch.log_softmax(logits.float() / batch.temperature[:, None, None], dim=-1)
    chosen = logprobs.gather(-1, batch.targets[..., None]).squeeze(-1)
    entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
    return chosen, entropy

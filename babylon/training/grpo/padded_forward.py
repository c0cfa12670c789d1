"""Forward pass over calls padded into one batch. It works with every causal LM."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from babylon.training.grpo.training_input import CallTokens


def padded_values(model: nn.Module, calls: Sequence[CallTokens]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy ``[C, T]`` of each completion token, 0 beyond a call's length.

    The head runs only at positions that predict a completion token, in the precision of the model's
    other matrix products; the softmax is fp32. Padding is on the right, where causal attention does
    not see it, so no attention mask is needed.
    """
    device = next(model.parameters()).device
    inputs = [torch.tensor([*call.prompt, *call.completion]) for call in calls]
    input_ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(device)
    starts = torch.tensor([len(call.prompt) - 1 for call in calls], device=device)
    lengths = torch.tensor([len(call.completion) for call in calls], device=device)
    steps = torch.arange(int(lengths.max()), device=device)
    mask = steps < lengths[:, None]  # [C, T]
    positions = torch.where(mask, starts[:, None] + steps, starts[:, None])
    needed, index = torch.unique(positions, return_inverse=True)
    logits = model(input_ids=input_ids[:, :-1], logits_to_keep=needed, use_cache=False).logits
    logits = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
    temperature = torch.tensor([call.temperature for call in calls], device=device)
    logprobs = torch.log_softmax(logits.float() / temperature[:, None, None], dim=-1)
    targets = input_ids.gather(1, positions + 1)
    chosen = logprobs.gather(-1, targets[..., None]).squeeze(-1)
    detached = logprobs.detach()
    entropy = -(detached.exp() * detached).sum(-1)
    return torch.where(mask, chosen, 0.0), torch.where(mask, entropy, 0.0)

"""The teacher of self-distillation: the parent, which reads feedback on a reply before the reply.

Its logprobs of the logged tokens are computed once an update, on a tree of their own.
"""

from dataclasses import replace

import torch
from torch import Tensor

from babylon.training.grpo.diagnostics import Logged
from babylon.training.grpo.forward import FittingForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.ranks import Ranks, logprobs_of_tree
from babylon.training.grpo.training_window import TrainingWindow


def teacher_logprobs(
    window: TrainingWindow, logged: Logged, fitting: FittingForward, ranks: Ranks
) -> Tensor | None:
    """Logprobs ``[N]`` of the window's tokens, NaN in calls without words; None without any words.

    The model must still be the parent.
    """
    told = [position for position, call in enumerate(window.calls) if call.hindsight]
    if not told:
        return None
    calls = [window.calls[position] for position in told]
    tree = compile_tree([replace(call, prompt=call.hindsight) for call in calls])
    table = torch.full_like(logged.mu, torch.nan)
    table[logged.tokens_of(told)] = logprobs_of_tree(fitting, tree, ranks).to(table)
    return table

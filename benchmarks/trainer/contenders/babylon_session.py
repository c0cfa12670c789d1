"""Our trainer: the window's prefix tree, the fastest path for the device, the default loss."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from babylon.core.memory import free_memory_is_kept
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.loss_inputs import LossBounds, LossInputs
from babylon.training.grpo.losses import loss_terms
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens
from babylon.training.grpo.tree_forward import Values
from benchmarks.trainer.cases import Window
from benchmarks.trainer.contenders import Session, Task
from benchmarks.trainer.contenders.local import LocalSession, policy
from benchmarks.trainer.flops import Work, tree_work


class BabylonSession(LocalSession):
    """Our trainer. The tree is compiled before timing, as it is once a window in training."""

    def __init__(self, task: Task) -> None:
        self.memory = ExitStack()  # as around an update, until this session is dropped
        self.memory.enter_context(free_memory_is_kept())
        super().__init__(policy(task), task)
        self.tree = compile_tree(call_tokens(task.window))
        self.forward = PolicyForward(self.model)  # portions and kept activations of an update
        self.loss = WindowLoss(task.window)
        self.shares = (1.0,)
        self.work = window_work(task.window)

    def accumulate(self, part: int) -> None:
        self.forward.accumulate(self.tree, self.loss)


class WindowLoss:
    """The default loss over calls of the window, with mu also as the proximal policy's logprobs."""

    def __init__(self, window: Window, device: str = "cpu") -> None:
        longest = max(len(call.completion) for call in window.calls)
        self.mask = torch.zeros(len(window.calls), longest, dtype=torch.bool, device=device)
        self.mu = torch.zeros(len(window.calls), longest, device=device)
        for row, call in enumerate(window.calls):
            self.mask[row, : len(call.completion)] = True
            if call.mu is not None:
                self.mu[row, : len(call.mu)] = torch.from_numpy(call.mu).to(device)
        self.logged = window.calls[0].mu is not None
        self.advantage = torch.tensor([call.advantage for call in window.calls], device=device)
        self.weight = torch.full_like(self.advantage, 1 / window.trained_tokens)

    def __call__(self, calls: Sequence[int], values: Values) -> Tensor:
        theta = values.logprobs
        rows, width = torch.as_tensor(calls, device=theta.device), theta.shape[1]
        mask = self.mask[rows, :width]
        mu = self.mu[rows, :width] if self.logged else theta.detach()
        inputs = LossInputs(
            theta=theta,
            proximal=mu,
            mu=mu,
            known=mask & self.logged,
            mask=mask,
            advantage=self.advantage[rows],
        )
        tokens = loss_terms("ppo_clip", inputs, LossBounds()).loss
        return (tokens.sum(-1) * self.weight[rows]).sum()


def call_tokens(window: Window) -> list[CallTokens]:
    return [
        CallTokens(
            prompt=call.prompt.tolist(),
            completion=call.completion.tolist(),
            logprobs=None if call.mu is None else call.mu.tolist(),
        )
        for call in window.calls
    ]


def window_work(window: Window) -> Work:
    """Work of every distinct prefix once. A call's last token is only a target."""
    sequences = ([*call.prompt, *call.completion][:-1] for call in window.calls)
    return tree_work(sequences, window.trained_tokens)


def open_session(task: Task, variant: str) -> Session:
    return BabylonSession(task)

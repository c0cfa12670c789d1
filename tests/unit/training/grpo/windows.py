"""Small windows for the tests of the trainer, and the default loss written straight."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

from babylon.training.grpo.advantage import advantages
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.train_report import TrainReport
from babylon.training.grpo.trainer import train_on_window
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import compile_window
from tests.tiny_policy import tiny_model
from tests.unit.training.grpo.trees import naive_logprobs

TIMINGS = ("training_s", "unique_tokens_per_s", "trained_tokens_per_s")
"""Fields of a report that differ between two runs of the same update."""


def window(
    seed: int = 0, *, known: bool = True, agents: int = 4, groups: int = 2
) -> list[ScoredTrajectory]:
    """Scenarios whose agents share a prompt, calls of random lengths, mu near the model's own."""
    random = Random(seed)
    own = tiny_model(0)

    def some(low: int, high: int) -> list[int]:
        return [random.randrange(2, 50) for _ in range(random.randint(low, high))]

    def call(shared: list[int]) -> CallTokens:
        tokens = CallTokens(
            prompt=[*shared, *some(1, 6)],
            completion=some(1, 6),
            logprobs=None,
            temperature=random.choice([0.7, 1.0]),
        )
        if not known:
            return tokens
        exact = naive_logprobs(own, tokens).detach()
        logprobs = [float(value) + random.uniform(-0.01, 0.01) for value in exact]
        return replace(tokens, logprobs=logprobs)

    result = []
    for group in range(groups):
        shared = some(4, 8)
        result += [
            ScoredTrajectory(
                trajectory_id=f"{group}-{agent}",
                group=f"scenario-{group}",
                score=random.random(),
                calls=[call(shared) for _ in range(random.randint(1, 4))],
            )
            for agent in range(agents)
        ]
    return result


def naive_gradient(model: Any, trajectories: list[ScoredTrajectory]) -> torch.Tensor:
    """The formula of the default loss, straight: one full-window step from p, so r = 1."""
    advantage = advantages(trajectories)
    count = len(advantage)
    mean_length = sum(len(c.completion) for t in trajectories for c in t.calls) / sum(
        len(t.calls) for t in trajectories
    )
    loss = torch.zeros(())
    for t in trajectories:
        for call in t.calls:
            theta = naive_logprobs(model, call)
            ratio = torch.exp(theta - theta.detach())
            mu = theta.detach() if call.logprobs is None else torch.tensor(call.logprobs)
            w = torch.exp(theta.detach() - mu).clamp(max=2)
            weight = 1 / (count * len(t.calls) * mean_length)
            loss = loss - weight * (w * ratio * advantage[t.trajectory_id]).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


class Probe(torch.optim.Optimizer):
    """Keeps the gradients it is given and changes nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {})
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        tuned = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([p.grad.flatten() for p in tuned]))


def trained_gradient(
    model: Any, trajectories: list[ScoredTrajectory], **options: Any
) -> torch.Tensor:
    """The gradient of one full-window step."""
    options = {"trajectories_per_step": 100, "iterations": 1, "grad_clip": 1e9} | options
    probe = Probe(model)
    train_on_window(model, probe, compile_window(trajectories, TrainerConfig(**options)))
    return probe.gradients[-1]


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def update(
    model: Any,
    trajectories: list[ScoredTrajectory],
    *,
    staleness: dict[int, int] | None = None,
    **options: Any,
) -> TrainReport:
    """A whole update, by an Adam that is warm at once."""
    options = {"learning_rate": 1e-4, "warmup_steps": 0} | options
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    made = compile_window(trajectories, TrainerConfig(**options), staleness=staleness)
    return train_on_window(model, optimizer, made)


def weights(model: Any) -> torch.Tensor:
    """All parameters, copied: ``[P]``."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])

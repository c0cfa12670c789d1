"""Sampled prompts for the tests of preferences, and the losses one reply at a time."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.training.grpo.config import TrainerConfig
from babylon.training.preferences.config import PreferenceConfig
from babylon.training.preferences.examples import Examples
from babylon.training.preferences.preference_report import PreferenceReport
from babylon.training.preferences.trainer import train_on_preferences
from tests.unit.training.grpo.trees import naive_logprobs
from tests.unit.training.grpo.windows import Probe


def prompts(seed: int = 0, count: int = 4, replies: int = 3) -> list[PromptReplies]:
    """Prompts with a common beginning, and replies of random lengths and distinct values."""
    random = Random(seed)

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(random.randrange(2, 50) for _ in range(random.randint(low, high)))

    shared = some(8, 8)
    return [
        PromptReplies(
            trajectory_id=f"t{number}",
            step=number,
            prompt_token_ids=shared + some(2, 6),
            replies=tuple(
                ValuedReply(completion_token_ids=some(1, 7), value=random.random())
                for _ in range(replies)
            ),
            temperature=random.choice([0.7, 1.0]),
            policy_version=3,
        )
        for number in range(count)
    ]


def settings(**options: Any) -> TrainerConfig:
    """A warm optimiser, and no bound but those that are given."""
    common: dict[str, Any] = {
        "warmup_steps": 0,
        "iterations": 1,
        "trajectories_per_step": 100,
        "grad_clip": 1e9,
        "stop_kl": 1e9,
    }
    return TrainerConfig(**common | options)


def naive_sums(model: Any, examples: Examples) -> Tensor:
    """Log-probability of each reply ``[C]``, by a forward pass over it alone."""
    return torch.stack([naive_logprobs(model, call).sum() for call in examples.calls])


def naive_pair_loss(
    theta: Tensor, reference: Tensor, examples: Examples, options: PreferenceConfig
) -> Tensor:
    """The papers' formulas, pair by pair."""
    terms = []
    lengths = [len(call.completion) for call in examples.calls]
    for unit in examples.units:
        for w, b in unit.pairs:
            own = 1 if options.loss == "sigmoid" else lengths[w]
            other = 1 if options.loss == "sigmoid" else lengths[b]
            gap = (theta[w] - reference[w]) / own - (theta[b] - reference[b]) / other
            if options.loss == "ipo":
                term = (gap - 0.5 / options.beta) ** 2
            else:
                term = torch.log(1 + torch.exp(-options.beta * gap))
            terms.append(term - options.nll * theta[w] / lengths[w])
    return sum(terms[1:], terms[0]) / len(terms)


def gradient_of(model: Any, loss: Tensor) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def first_gradient(
    model: Any, examples: Examples, options: PreferenceConfig, **changes: Any
) -> Tensor:
    """The gradient of the first train step."""
    probe = Probe(model)
    train_on_preferences(model, probe, examples, settings(**changes), options)
    return probe.gradients[0]


def update(
    model: Any, examples: Examples, options: PreferenceConfig | None = None, **changes: Any
) -> PreferenceReport:
    """A whole update by an Adam that is warm at once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    config = settings(**{"learning_rate": 1e-3, "grad_clip": 1.0} | changes)
    return train_on_preferences(model, optimizer, examples, config, options or PreferenceConfig())

"""The update against a naive reference, and what must not change it."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from babylon.grpo.advantage import advantages, weigh_calls
from babylon.grpo.batch import CallTokens, ScoredTrajectory, make_batch
from babylon.grpo.logprobs import completion_logprobs
from babylon.grpo.trainer import NothingToTrainError, TrainerConfig, TrainReport, train_on_window
from tests.tiny_policy import tiny_model


def window(seed: int = 0, *, known: bool = True, agents: int = 4) -> list[ScoredTrajectory]:
    """Two scenarios, a few calls of random lengths, mu near the model's own probabilities."""
    random = Random(seed)
    own = tiny_model(0)

    def call() -> CallTokens:
        prompt = [random.randrange(2, 50) for _ in range(random.randint(3, 12))]
        completion = [random.randrange(2, 50) for _ in range(random.randint(1, 6))]
        temperature = random.choice([0.7, 1.0])
        tokens = CallTokens(
            prompt=prompt, completion=completion, logprobs=None, temperature=temperature
        )
        if not known:
            return tokens
        exact = naive_logprobs(own, tokens).detach()
        logprobs = [float(value) + random.uniform(-0.01, 0.01) for value in exact]
        return CallTokens(
            prompt=prompt, completion=completion, logprobs=logprobs, temperature=temperature
        )

    return [
        ScoredTrajectory(
            trajectory_id=f"{group}-{agent}",
            group=group,
            score=random.random(),
            calls=[call() for _ in range(random.randint(1, 4))],
        )
        for group in ("one", "two")
        for agent in range(agents)
    ]


def naive_logprobs(model: Any, tokens: CallTokens) -> torch.Tensor:
    """One call at a time through the whole head: ``[T]``."""
    ids = torch.tensor([[*tokens.prompt, *tokens.completion]])
    logits = model(input_ids=ids).logits[0].float() / tokens.temperature
    logprobs = torch.log_softmax(logits, -1)
    start = len(tokens.prompt) - 1
    return torch.stack([logprobs[start + t, y] for t, y in enumerate(tokens.completion)])


def naive_gradient(model: Any, trajectories: list[ScoredTrajectory]) -> list[torch.Tensor]:
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
    return list(torch.autograd.grad(loss, parameters))


class Probe(torch.optim.Optimizer):
    """Keeps the gradient it is given and changes nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {})
        self.gradient: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.gradient = [p.grad.clone() for p in self.param_groups[0]["params"]]


def trained_gradient(
    model: Any, trajectories: list[ScoredTrajectory], **options: Any
) -> torch.Tensor:
    config = TrainerConfig(iterations=1, trajectories_per_step=100, grad_clip=1e9, **options)
    probe = Probe(model)
    train_on_window(model, probe, trajectories, config)
    return torch.cat([g.flatten() for g in probe.gradient])


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def lora(model: Qwen3ForCausalLM) -> Any:
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # starts at zero, which would leave lora_A without gradient
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted.eval()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_formula(seed: int, known: bool) -> None:
    trajectories = window(seed, known=known)
    reference = torch.cat([g.flatten() for g in naive_gradient(tiny_model(0), trajectories)])
    ours = trained_gradient(tiny_model(0), trajectories)
    assert relative_error(ours, reference) < 1e-5


def test_the_gradient_of_an_adapter_is_that_of_the_formula() -> None:
    trajectories = window(known=False)
    adapted = lora(tiny_model(0))
    reference = torch.cat([g.flatten() for g in naive_gradient(adapted, trajectories)])
    assert relative_error(trained_gradient(adapted, trajectories), reference) < 1e-5


def test_neither_micro_batches_nor_order_change_the_gradient() -> None:
    trajectories = window()
    whole = trained_gradient(tiny_model(0), trajectories)
    split = trained_gradient(tiny_model(0), trajectories, micro_batch_tokens=20)
    shuffled = trained_gradient(tiny_model(0), trajectories[::-1])
    assert relative_error(split, whole) < 1e-5
    assert relative_error(shuffled, whole) < 1e-5


def test_logprobs_equal_a_forward_of_each_call_alone() -> None:
    trajectories, model = window(), tiny_model(0)
    calls = weigh_calls(trajectories, advantages(trajectories))
    batched, _ = completion_logprobs(model, make_batch(calls))
    for row, call in zip(batched, calls, strict=True):
        alone = naive_logprobs(model, call.tokens)
        torch.testing.assert_close(row[: len(alone)], alone, atol=1e-5, rtol=1e-5)


def update(model: Any, trajectories: list[ScoredTrajectory], **options: Any) -> TrainReport:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return train_on_window(model, optimizer, trajectories, TrainerConfig(**options))


def test_an_update_makes_good_trajectories_likelier() -> None:
    trajectories, model = window(), tiny_model(0)
    advantage = advantages(trajectories)

    def preference() -> float:
        with torch.no_grad():
            return sum(
                advantage[t.trajectory_id] * float(naive_logprobs(model, call).mean())
                for t in trajectories
                for call in t.calls
            )

    before = preference()
    report = update(model, trajectories, iterations=3, stop_kl=1.0, stop_clip_fraction=1.0)
    assert preference() > before
    assert report.kl_after > 0 and report.iterations == 3 and report.calls_without_logprobs == 0


def test_the_remaining_iterations_are_dropped_once_the_policy_moved_far() -> None:
    report = update(tiny_model(0), window(), iterations=50, stop_kl=1e-4)
    assert report.stopped_early and report.iterations < 50


def test_a_window_that_teaches_nothing_leaves_the_model_alone() -> None:
    model = tiny_model(0)
    before = [p.clone() for p in model.parameters()]
    tied = [
        ScoredTrajectory(trajectory_id=t.trajectory_id, group=t.group, score=0.5, calls=t.calls)
        for t in window()
    ]
    with pytest.raises(NothingToTrainError, match="differing scores"):
        update(model, tied)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_too_many_calls_without_logprobs_are_refused() -> None:
    with pytest.raises(NothingToTrainError, match="100% of the calls"):
        update(tiny_model(0), window(known=False), max_missing_logprobs=0.5)


def test_the_same_seed_gives_the_same_weights() -> None:
    models = tiny_model(0), tiny_model(0)
    for model in models:
        update(model, window(), iterations=2, trajectories_per_step=3, stop_kl=1.0)
    first, second = (list(model.parameters()) for model in models)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_stale_data_is_seen_as_stale() -> None:
    trajectories = window()
    fresh = update(tiny_model(0), trajectories, iterations=1)
    stale = update(tiny_model(5), trajectories, iterations=1)
    assert fresh.logprob_mismatch < 0.02 < stale.logprob_mismatch
    assert stale.ess < fresh.ess
    assert stale.kl_before > fresh.kl_before


def impossible(trajectories: list[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The same calls as if another model had sampled them: all of their tokens are masked."""
    return [
        replace(t, calls=[replace(c, logprobs=[9.0] * len(c.completion)) for c in t.calls])
        for t in trajectories
    ]


def test_a_window_whose_every_token_is_masked_leaves_the_model_alone() -> None:
    model = tiny_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = TrainerConfig(iterations=1, stop_kl=10.0)
    train_on_window(model, optimizer, window(), config)  # Adam has moments, and would go on
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NothingToTrainError, match="is masked"):
        train_on_window(model, optimizer, impossible(window()), config)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))

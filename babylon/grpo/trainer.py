"""GRPO on one logged window: a pass is called an iteration, an optimiser update a train step.

Trajectories are shuffled, ``trajectories_per_step`` of them make a train step, and their calls
are run in micro-batches whose gradients add up: the denominator is the step's, never the
micro-batch's. Remaining iterations are dropped once the policy has moved far enough from where
the window started (k3 or clip fraction).
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from babylon.grpo.advantage import advantages, weigh_calls
from babylon.grpo.batch import CallBatch, ScoredTrajectory, WeightedCall, make_batch
from babylon.grpo.logprobs import completion_logprobs
from babylon.grpo.loss import LossConfig, LossTerms, decoupled_ppo_loss

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How long, how fast and in which portions a window is trained."""

    iterations: int = 10
    trajectories_per_step: int = 8
    micro_batch_tokens: int = 8192  # padded tokens a forward pass
    learning_rate: float = 1e-5
    grad_clip: float = 1.0
    stop_kl: float = 0.03
    stop_clip_fraction: float = 0.3
    max_missing_logprobs: float = 1.0  # share of calls without mu above which training is refused
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What an update did. Fractions are of trained tokens unless they say calls or groups."""

    training_loss: float  # mean over train steps
    train_steps: int  # that moved the model: one whose tokens are all masked does not
    iterations: int
    trained_trajectories: int
    groups_without_signal: int
    calls: int
    tokens: int
    calls_without_logprobs: int
    kl_before: float  # k3(mu || p): how stale the window was
    kl_after: float  # k3(p || theta): how far the update went
    logprob_mismatch: float  # mean |log p - log mu|, nats
    ess: float  # of pi_p / mu over the tokens whose mu is known, as a share; 1 when none is
    clip_fraction: float
    masked_fraction: float  # by any of the three reasons below, which may overlap
    masked_band: float
    masked_negative: float
    masked_impossible: float
    entropy: float
    grad_norm: float
    stopped_early: bool


class NothingToTrainError(ValueError):
    """No group has differing scores, too many calls lack logprobs, or every token is masked."""


def train_on_window(
    model: Any,
    optimizer: torch.optim.Optimizer,
    trajectories: Sequence[ScoredTrajectory],
    config: TrainerConfig,
    *,
    reference: AbstractContextManager[object] | None = None,
    progress: Progress | None = None,
) -> TrainReport:
    """Update ``model`` in place on one window.

    Args:
        reference: entered to turn ``model`` into the reference policy (adapters off); needed
            only with a KL penalty.

    Raises:
        NothingToTrainError: the window teaches nothing; the model is unchanged.
        FloatingPointError: the loss or gradient is not finite; the model must be discarded.
    """
    advantage = advantages(trajectories)
    calls = weigh_calls(trajectories, advantage)
    _check(trajectories, calls, config)
    model.eval()  # no dropout layers: ratios must start at one
    window = _Window.compile(model, calls, config, reference)
    updates = _Updates()
    steps_an_iteration = math.ceil(len(advantage) / config.trajectories_per_step)
    random = Random(config.seed)
    iteration = 0
    for iteration in range(1, config.iterations + 1):
        terms: list[LossTerms] = []
        for number, step in enumerate(window.steps(random), start=1):
            terms += _train_step(model, optimizer, step, config, updates)
            if progress is not None:
                done = (iteration - 1) * steps_an_iteration + number
                progress(done, config.iterations * steps_an_iteration)
        updates.finish_iteration(terms)
        if updates.kl > config.stop_kl or updates.clip_fraction > config.stop_clip_fraction:
            break
    if not updates.grad_norms:
        raise NothingToTrainError(
            f"every one of the {window.tokens} tokens is masked: the logged logprobs are not those"
            " of the policy that is trained; compare their versions and tokenizers"
        )
    return updates.report(
        window,
        kl_after=window.kl_to(model),
        iterations=iteration,
        trained_trajectories=len(advantage),
        groups_without_signal=len({t.group for t in trajectories})
        - len({t.group for t in trajectories if t.trajectory_id in advantage}),
        stopped_early=iteration < config.iterations,
    )


def _check(
    trajectories: Sequence[ScoredTrajectory], calls: Sequence[WeightedCall], config: TrainerConfig
) -> None:
    if not calls:
        groups = len({t.group for t in trajectories})
        raise NothingToTrainError(
            f"none of the {groups} groups ({len(trajectories)} trajectories) has two members with"
            " differing scores: let more agents play a scenario, or use another scorer"
        )
    missing = sum(call.tokens.logprobs is None for call in calls) / len(calls)
    if missing > config.max_missing_logprobs:
        raise NothingToTrainError(
            f"{missing:.0%} of the calls have no logged logprobs, allowed are"
            f" {config.max_missing_logprobs:.0%}: play through the gateway, or raise"
            " MAX_MISSING_LOGPROBS"
        )


def _train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    step: Sequence["_Prepared"],
    config: TrainerConfig,
    updates: "_Updates",
) -> list[LossTerms]:
    count = len({call.trajectory for prepared in step for call in prepared.calls})
    terms = []
    for prepared in step:
        theta, entropy = completion_logprobs(model, prepared.batch)
        term = _loss(prepared, theta, entropy, count, config.loss)
        if not torch.isfinite(term.loss):
            raise FloatingPointError(f"loss is {term.loss.item()}: lower the learning rate")
        term.loss.backward()  # type: ignore[no-untyped-call]
        terms.append(replace(term, loss=term.loss.detach()))
    if all(term.masked == term.tokens for term in terms):
        optimizer.zero_grad(set_to_none=True)  # Adam would move the model by its old moments
        return terms
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
    if not torch.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm.item()}: lower the learning rate")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    updates.grad_norms.append(float(norm))
    return terms


def _loss(
    prepared: "_Prepared", theta: Tensor, entropy: Tensor, trajectories: int, config: LossConfig
) -> LossTerms:
    batch = prepared.batch
    return decoupled_ppo_loss(
        theta,
        prepared.proximal,
        batch.mu,
        batch.has_mu,
        batch.mask,
        batch.advantage,
        batch.weight / trajectories,
        config,
        entropy=entropy,
        reference=prepared.reference,
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A micro-batch with what does not change while it is trained."""

    calls: Sequence[WeightedCall]
    batch: CallBatch
    proximal: Tensor
    reference: Tensor | None


@dataclass(frozen=True, slots=True)
class _Window:
    """The window's calls by trajectory, and the frozen policies' logprobs of each call."""

    calls: Sequence[WeightedCall]
    proximal: dict[int, Tensor]  # position in ``calls`` → [T_call]
    reference: dict[int, Tensor] | None
    config: TrainerConfig
    device: torch.device

    @classmethod
    def compile(
        cls,
        model: Any,
        calls: Sequence[WeightedCall],
        config: TrainerConfig,
        reference: AbstractContextManager[object] | None,
    ) -> "_Window":
        device = next(model.parameters()).device
        proximal = _frozen_logprobs(model, calls, config, device)
        anchored = None
        if config.loss.kl_penalty:
            if reference is None:
                raise ValueError("a KL penalty needs a reference policy")
            with reference:
                anchored = _frozen_logprobs(model, calls, config, device)
        return cls(calls, proximal, anchored, config, device)

    @property
    def tokens(self) -> int:
        return sum(len(call.tokens.completion) for call in self.calls)

    def steps(self, random: Random) -> Iterator[list[_Prepared]]:
        """One iteration: train steps of whole trajectories in random order, as micro-batches.

        Steps are of equal size, give or take one: a short last one would let few trajectories
        move the policy as far as many.
        """
        order = sorted({call.trajectory for call in self.calls})
        random.shuffle(order)
        count = math.ceil(len(order) / self.config.trajectories_per_step)
        by_trajectory: dict[int, list[int]] = {}
        for position, call in enumerate(self.calls):
            by_trajectory.setdefault(call.trajectory, []).append(position)
        for step in range(count):
            part = order[len(order) * step // count : len(order) * (step + 1) // count]
            chosen = [p for t in part for p in by_trajectory[t]]
            yield [self._prepare(part) for part in _micro_batches(self.calls, chosen, self.config)]

    def _prepare(self, positions: Sequence[int]) -> _Prepared:
        calls = [self.calls[position] for position in positions]
        batch = make_batch(calls, self.device)
        reference = self.reference
        return _Prepared(
            calls,
            batch,
            _stack([self.proximal[position] for position in positions], batch),
            None if reference is None else _stack([reference[p] for p in positions], batch),
        )

    def kl_to(self, model: Any) -> float:
        """Mean k3(p || theta) over the window's tokens, nats."""
        after = _frozen_logprobs(model, self.calls, self.config, self.device)
        return _mean_k3([(self.proximal[p], after[p]) for p in range(len(self.calls))])

    def staleness(self) -> tuple[float, float]:
        """(mean k3(mu || p), mean |log p - log mu|) over tokens whose mu is known, nats."""
        pairs = [
            (torch.tensor(call.tokens.logprobs), self.proximal[position].cpu())
            for position, call in enumerate(self.calls)
            if call.tokens.logprobs is not None
        ]
        if not pairs:
            return 0.0, 0.0
        gaps = torch.cat([(p - mu).abs() for mu, p in pairs])
        return _mean_k3(pairs), float(gaps.mean())


def _frozen_logprobs(
    model: Any, calls: Sequence[WeightedCall], config: TrainerConfig, device: torch.device
) -> dict[int, Tensor]:
    result: dict[int, Tensor] = {}
    with torch.no_grad():
        for positions in _micro_batches(calls, range(len(calls)), config):
            batch = make_batch([calls[position] for position in positions], device)
            logprobs, _ = completion_logprobs(model, batch)
            for row, position in enumerate(positions):
                result[position] = logprobs[row, : len(calls[position].tokens.completion)].clone()
    return result


def _micro_batches(
    calls: Sequence[WeightedCall], positions: Sequence[int], config: TrainerConfig
) -> Iterator[list[int]]:
    """Calls of similar length together, at most ``micro_batch_tokens`` padded tokens a portion."""

    def length(position: int) -> int:
        tokens = calls[position].tokens
        return len(tokens.prompt) + len(tokens.completion)

    portion: list[int] = []
    for position in sorted(positions, key=length, reverse=True):
        widest = length(portion[0]) if portion else 0
        if portion and widest * (len(portion) + 1) > config.micro_batch_tokens:
            yield portion
            portion = []
        portion.append(position)
    if portion:
        yield portion


def _stack(rows: Sequence[Tensor], batch: CallBatch) -> Tensor:
    stacked = torch.zeros_like(batch.mu)
    for index, row in enumerate(rows):
        stacked[index, : len(row)] = row
    return stacked


def _mean_k3(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """In fp64: the gaps of an unchanged policy are so small that fp32 can make k3 negative."""
    delta = torch.cat([other - sampled for sampled, other in pairs]).double()
    return float((torch.expm1(delta) - delta).mean().item())


class _Updates:
    """Running record of an update."""

    def __init__(self) -> None:
        self.grad_norms: list[float] = []
        self.losses: list[float] = []
        self.last: list[LossTerms] = []

    def finish_iteration(self, terms: list[LossTerms]) -> None:
        self.last = terms
        self.losses.append(float(sum(term.loss for term in terms)))

    def _share(self, name: str) -> float:
        total = float(sum(getattr(term, name) for term in self.last))
        return total / max(1, sum(term.tokens for term in self.last))

    @property
    def kl(self) -> float:
        return self._share("kl_sum")

    @property
    def clip_fraction(self) -> float:
        return self._share("clipped")

    def _effective_sample_size(self) -> float:
        """``(sum w)^2 / (n sum w^2)`` of the untruncated weights."""
        known = sum(term.known for term in self.last)
        square = sum(term.importance_square_sum for term in self.last)
        total = sum(term.importance_sum for term in self.last)
        return min(1.0, total**2 / (known * square)) if known and square else 1.0

    def report(self, window: _Window, **counted: Any) -> TrainReport:
        kl_before, mismatch = window.staleness()
        steps = len(self.grad_norms)
        return TrainReport(
            training_loss=sum(self.losses) / max(1, steps),
            train_steps=steps,
            calls=len(window.calls),
            tokens=window.tokens,
            calls_without_logprobs=sum(c.tokens.logprobs is None for c in window.calls),
            kl_before=kl_before,
            logprob_mismatch=mismatch,
            ess=self._effective_sample_size(),
            clip_fraction=self.clip_fraction,
            masked_fraction=self._share("masked"),
            masked_band=self._share("masked_band"),
            masked_negative=self._share("masked_negative"),
            masked_impossible=self._share("masked_impossible"),
            entropy=self._share("entropy_sum"),
            grad_norm=sum(self.grad_norms) / max(1, steps),
            **counted,
        )

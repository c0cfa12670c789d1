"""The running record of an update, and the report that is computed from it.

The record holds each policy's logprobs of each token and the steps' figures. Together with weights
and optimiser, it resumes an interrupted update. The report's figures are computed once, at the end
of an update, over all tokens of the window, so they do not depend on how train steps were cut into
portions. Sums are fp64, because in fp32 the rounding errors of an unchanged policy can make k3
negative.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from babylon.training.grpo.forward import FittingForward
from babylon.training.grpo.kept_state import Kept
from babylon.training.grpo.loss_inputs import LossInputs, LossTerms
from babylon.training.grpo.ranks import Ranks
from babylon.training.grpo.shards import whole
from babylon.training.grpo.train_report import TrainReport
from babylon.training.grpo.training_window import TrainingWindow
from babylon.training.grpo.tree_forward import Values, flat_places, padded_places

FLAGS = ("band", "negative", "impossible", "clipped_low", "clipped_high")
SAMPLE = 65_536  # values that represent a whole tensor
_ROUNDING = 0.02  # nats a token; weights rounded to bf16 move a call by a fifth of it
_CLEARLY = 8.0  # median calls: rounding moves unlikely calls more than likely ones
_TELLING = 8  # tokens of a call; a mean over fewer is chance
Tokens = Tensor | slice  # places in a table
ALL = slice(None)
RecordState = dict[str, Any]  # field → value: tensors, numbers and lists of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """The window as tensors: C calls with N completion tokens, one call after the other.

    Tables of tokens are flat, so one long reply among short ones costs nothing.
    """

    mu: Tensor  # [N], behaviour logprobs, 0 where unknown
    known: Tensor  # [N] bool, where mu is known
    exact: Tensor  # [N] bool, where mu was logged by the parent itself
    advantage: Tensor  # [C]
    offsets: Tensor  # [C + 1], where each call's tokens begin

    @classmethod
    def of(cls, window: TrainingWindow, device: torch.device) -> "Logged":
        """The tensors of a window, on a device."""
        ends = np.cumsum([0, *window.lengths])
        mu = torch.zeros(int(ends[-1]))
        known = torch.zeros_like(mu, dtype=torch.bool)
        exact = known.clone()
        for row, call in enumerate(window.calls):
            if call.logprobs is not None:
                at = slice(*ends[row : row + 2].tolist())
                mu[at] = torch.tensor(call.logprobs)
                known[at] = True
                exact[at] = window.staleness[row] == 0
        return cls(
            mu=mu.to(device),
            known=known.to(device),
            exact=exact.to(device),
            advantage=torch.tensor(window.advantages, device=device),
            offsets=torch.from_numpy(ends).to(device),
        )

    def tokens_of(self, calls: Sequence[int]) -> Tensor:
        """Places of the calls' tokens in the tables, ``[n]``."""
        places = flat_places(self.offsets.cpu().numpy(), calls)
        return torch.from_numpy(places).to(self.offsets.device)


@dataclass(slots=True, kw_only=True)
class UpdateRecord:
    """State of an update besides weights and optimiser.

    ``theta``, ``entropy`` and ``flags`` are from the last iteration, each call's before the train
    step that trained it moved the model.
    """

    proximal: Tensor  # [N], logprobs of the parent
    reference: Tensor | None  # [N], logprobs of the reference policy
    theta: Tensor  # [N], logprobs of the model in training
    entropy: Tensor  # [N]
    flags: Tensor  # [5, N] bool, in the order of FLAGS
    weights_before: list[Tensor]
    losses: list[float]  # of the train steps that moved the model
    grad_norms: list[float]
    iteration: int = 1
    step: int = 0  # finished train steps of the iteration
    learning_rate: float = 0.0  # of the last train step
    halvings: int = 0
    training_s: float = 0.0
    forwarded_tokens: int = 0  # unique tokens, in train steps
    trained_tokens: int = 0
    kept: Kept | None = None  # the state before the iteration, which was within the bounds
    kept_at: tuple[int, int] = (1, 0)  # that iteration, and the steps that had moved the model
    undone: int = 0  # iterations; each halves the learning rate
    teacher: Tensor | None = None  # [N], logprobs of the teacher, NaN where it has no words

    @classmethod
    def start(
        cls,
        proximal: Tensor,
        reference: Tensor | None,
        weights: list[Tensor],
        teacher: Tensor | None = None,
    ) -> "UpdateRecord":
        """The record of an update that has not trained yet."""
        flags = torch.zeros(len(FLAGS), *proximal.shape, dtype=torch.bool, device=proximal.device)
        return cls(
            proximal=proximal,
            reference=reference,
            theta=torch.zeros_like(proximal),
            entropy=torch.zeros_like(proximal),
            flags=flags,
            weights_before=weights,
            losses=[],
            grad_norms=[],
            teacher=teacher,
        )

    def state(self) -> RecordState:
        """The record as a dictionary for ``torch.save``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: RecordState, device: torch.device) -> "UpdateRecord":
        """The record with this ``state``, its tensors moved to ``device``."""
        return cls(**on_device(state, device))

    def inputs(self, logged: Logged, rows: Tensor, values: Values) -> LossInputs:
        """The inputs of the loss for some calls, as wide as their longest completion."""
        places, mask = padded_places(logged.offsets, rows)

        def part(table: Tensor) -> Tensor:
            return torch.where(mask, table[places], 0)

        return LossInputs(
            theta=values.logprobs,
            proximal=part(self.proximal),
            mu=part(logged.mu),
            known=part(logged.known).bool(),
            mask=mask,
            advantage=logged.advantage[rows],
            reference=None if self.reference is None else part(self.reference),
            entropy=values.entropy,
            teacher=None if self.teacher is None else part(self.teacher),
        )

    def note(self, logged: Logged, rows: Tensor, values: Values, terms: LossTerms) -> None:
        """Store a train step's values and flags of some calls."""
        places, mask = padded_places(logged.offsets, rows)
        at = places[mask]
        self.theta[at] = values.logprobs.detach()[mask]
        self.entropy[at] = values.entropy.detach()[mask]
        flags = (
            terms.masks.band,
            terms.masks.negative,
            terms.masks.impossible,
            terms.clipped_low,
            terms.clipped_high,
        )
        self.flags[:, at] = torch.stack([flag[mask] for flag in flags])

    def exchange(self, tokens: Tensor, mine: Tensor, add: Callable[[Tensor], None]) -> None:
        """Replace the values and flags of some tokens by those of the ranks that computed them.

        Args:
            tokens: places in the tables, ``[n]``.
            mine: ``[n]`` bool, the tokens that this rank computed.
            add: sums a tensor over all ranks, in place.
        """
        tables = self.proximal, self.theta, self.entropy, *self.flags
        rows = torch.stack([table[tokens].to(self.theta.dtype) for table in tables])
        rows[:, ~mine] = 0
        add(rows)
        for table, row in zip(tables, rows, strict=True):
            table[tokens] = row.to(table.dtype)


def on_device(state: RecordState, device: torch.device) -> RecordState:
    """The state with its tensors and lists of tensors moved to ``device``."""

    def moved(value: object) -> object:
        if isinstance(value, list):
            return [moved(item) for item in value]
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in state.items()}


@dataclass(frozen=True, slots=True)
class TrainState:
    """A running update. Model, optimiser, fitting and record change in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    window: TrainingWindow
    fitting: FittingForward
    logged: Logged
    record: UpdateRecord
    ranks: Ranks


def spread(values: Tensor) -> tuple[float, float, float, float]:
    """Mean, first and 99th percentile and maximum of ``values`` ``[M]``, ones if M is 0."""
    if not len(values):
        return 1.0, 1.0, 1.0, 1.0
    ordered = values.double().sort().values
    last = len(ordered) - 1
    p1, p99 = float(ordered[round(0.01 * last)]), float(ordered[round(0.99 * last)])
    return float(ordered.mean()), p1, p99, float(ordered[-1])


def divergence(sampled: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean k1 and k3 estimates of KL(sampled || other) over the tokens ``[M]``, 0 if M is 0."""
    delta = (other - sampled).double()
    if not len(delta):
        return 0.0, 0.0
    return -float(delta.mean()), float((torch.expm1(delta) - delta).mean())


def kl_of_iteration(record: UpdateRecord, tokens: Tokens = ALL) -> float:
    """k3(p || theta) of the last iteration, each step's theta before the step."""
    return divergence(record.proximal[tokens], record.theta[tokens])[1]


def clip_fraction(record: UpdateRecord, tokens: Tokens = ALL) -> float:
    """Share of tokens whose ratio was clipped or capped in the last iteration."""
    return _share(record.flags[3:, tokens].any(0))


def effective_sample_size(log_weights: Tensor) -> float:
    """``(sum w)^2 / (n sum w^2)`` of weights ``[n]`` given as logarithms, 1 if n is 0.

    It is computed from logarithms because some servers log -9999 for a token that was cut off. Its
    w overflows to infinity, and the resulting NaN would pass every comparison with a bound.
    """
    if not len(log_weights):
        return 1.0
    logs = log_weights.double()
    share = torch.exp(2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)) / len(logs)
    return float(share.clamp(max=1.0))  # rounding can exceed 1; NaN stays NaN


def calls_of_other_weights(logged: Logged, proximal: Tensor) -> int:
    """Number of the parent's calls whose logged logprobs ``[N]`` are not the parent's.

    Rounding moves all calls; other weights move those that they answered. vLLM mixed up adapters
    when one was loaded while others answered (vllm-project/vllm#47724), and reused cached prefixes
    of an adapter that was loaded again under its name (#42125). A call counts if its mean gap is
    beyond rounding and far beyond the median call's.
    """
    exact, count = logged.exact, len(logged.offsets) - 1
    gaps = _parents_gaps(logged, proximal)
    call = torch.repeat_interleave(torch.arange(count, device=gaps.device), logged.offsets.diff())
    tokens = torch.bincount(call[exact], minlength=count)
    sums = torch.zeros_like(tokens, dtype=gaps.dtype).index_add_(0, call[exact], gaps)
    means = (sums / tokens)[tokens >= _TELLING]
    if not len(means):
        return 0
    return int((means > max(_ROUNDING, _CLEARLY * float(means.median()))).sum())


def _parents_gaps(logged: Logged, proximal: Tensor) -> Tensor:
    """``|log p - log mu|`` of the tokens that the parent itself logged."""
    return (proximal - logged.mu)[logged.exact].double().abs()


def weight_sample(model: nn.Module) -> list[Tensor]:
    """Evenly spaced values of every tuned tensor, copied.

    A copy of all values would take as much memory as the gradient. Tensors of up to ``SAMPLE``
    values are complete.
    """
    return _sampled(model)


def update_norm(model: nn.Module, before: list[Tensor]) -> float:
    """Norm of the change over norm of the weights, estimated from ``weight_sample`` ``before``."""
    change = weights = 0.0
    tuned = [p for p in model.parameters() if p.requires_grad]
    for parameter, old, new in zip(tuned, before, _sampled(model), strict=True):
        scale = parameter.numel() / len(old)
        change += scale * float((new - old).double().square().sum())
        weights += scale * float(old.double().square().sum())
    return float((change / weights) ** 0.5) if weights else 0.0


def finite(after: Tensor) -> Tensor:
    """Return the logprobs of the trained policy.

    Raises:
        FloatingPointError: they are not finite.
    """
    if not torch.isfinite(after).all():
        raise FloatingPointError(
            "logprobs of the trained policy are not finite: discard the model, and lower"
            " LEARNING_RATE"
        )
    return after


def _in_use(state: TrainState) -> Tensor:
    """Log importance weights ``[n]`` with which tokens were trained: truncated, or masked."""
    known, dropped = state.logged.known, state.record.flags[:3].any(0)
    logs = (state.record.proximal - state.logged.mu)[known].double()
    most = math.log(state.window.config.bounds.max_importance)
    return logs.clamp(max=most).masked_fill(dropped[known], -math.inf)


def make_report(state: TrainState, after: Tensor) -> TrainReport:
    """The report of a finished update. ``after`` ``[N]`` are the result's logprobs."""
    window, logged, record, fitting = state.window, state.logged, state.record, state.fitting
    p, known = record.proximal, logged.known
    log_w = (p - logged.mu)[known].double()
    w_mean, w_p1, w_p99, w_max = spread(log_w.exp())
    r_mean, r_p1, r_p99, r_max = spread(torch.exp((record.theta - p).double()))
    k1_before, k3_before = divergence(logged.mu[known], p[known])
    k1_after, k3_after = divergence(p, after)
    k1_behaviour, k3_behaviour = divergence(logged.mu[known], after[known])
    # Without a reference, the divergence from it is zero.
    anchor = after if record.reference is None else record.reference
    k1_reference, k3_reference = divergence(after, anchor)
    shares = {name: _share(flag) for name, flag in zip(FLAGS, record.flags, strict=True)}
    mass, ages, sharing = window.mass_of_trajectories(), Counter(window.staleness), window.sharing
    return TrainReport(
        training_loss=fmean(record.losses),
        train_steps=len(record.losses),
        iterations=record.iteration - 1,
        iterations_undone=record.undone,
        stopped_early=record.iteration <= window.config.iterations,
        trained_trajectories=len(window.trajectory_ids),
        groups_without_signal=window.groups_without_signal,
        calls=len(window.calls),
        tokens=window.tokens,
        loss_mass_min=min(mass),
        loss_mass_max=max(mass),
        calls_without_logprobs=sum(c.logprobs is None for c in window.calls),
        calls_too_stale=window.calls_too_stale,
        staleness_0=ages[0],
        staleness_1=ages[1],
        staleness_2=ages[2],
        staleness_unknown=ages[None],
        logprob_mismatch=float(gaps.mean()) if len(gaps := _parents_gaps(logged, p)) else 0.0,
        calls_of_other_weights=calls_of_other_weights(logged, p),
        kl_before=k3_before,
        k1_before=k1_before,
        ess=effective_sample_size(_in_use(state)),
        importance_mean=w_mean,
        importance_p1=w_p1,
        importance_p99=w_p99,
        importance_max=w_max,
        kl_after=k3_after,
        kl_limit=window.config.kl_limit,
        k1_after=k1_after,
        kl_behaviour=k3_behaviour,
        k1_behaviour=k1_behaviour,
        kl_reference=k3_reference,
        k1_reference=k1_reference,
        calls_with_words=sum(bool(c.hindsight) for c in window.calls),
        teacher_before=_apart(p, record.teacher),
        teacher_after=_apart(after, record.teacher),
        ratio_mean=r_mean,
        ratio_p1=r_p1,
        ratio_p99=r_p99,
        ratio_max=r_max,
        clip_fraction=clip_fraction(record),
        clip_low_fraction=shares["clipped_low"],
        clip_high_fraction=shares["clipped_high"],
        masked_fraction=_share(record.flags[:3].any(0)),
        masked_band=shares["band"],
        masked_negative=shares["negative"],
        masked_impossible=shares["impossible"],
        entropy=float(record.entropy.double().mean()),
        grad_norm=fmean(record.grad_norms),
        update_norm=update_norm(state.model, record.weights_before),
        learning_rate=record.learning_rate,
        flat_tokens=sharing.flat_tokens,
        unique_tokens=sharing.unique_tokens,
        lost_tokens=sharing.lost_tokens,
        sharing_advice=sharing.advice,
        packing_ratio=sharing.flat_tokens / max(1, sharing.unique_tokens),
        training_s=record.training_s,
        unique_tokens_per_s=record.forwarded_tokens / max(record.training_s, 1e-9),
        trained_tokens_per_s=record.trained_tokens / max(record.training_s, 1e-9),
        oom_halvings=fitting.halvings,
        max_tokens=fitting.forward.max_tokens,
        activation_checkpointing=fitting.checkpointing,
    )


def _apart(one: Tensor, teacher: Tensor | None) -> float:
    return 0.0 if teacher is None else float((one - teacher).double().abs().nanmean())


def _share(flag: Tensor) -> float:
    return float(flag.double().mean())


def _sampled(model: nn.Module) -> list[Tensor]:
    tuned = (whole(p.detach()).flatten() for p in model.parameters() if p.requires_grad)
    return [flat[:: -(-len(flat) // SAMPLE)].clone() for flat in tuned]

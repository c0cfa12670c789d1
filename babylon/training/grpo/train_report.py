"""What an update did, in flat numbers and a sentence: for Postgres, W&B and the flow's artifact."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Fractions are of trained tokens, divergences in nats a token, unless they say otherwise.

    mu sampled the tokens, p is the parent, theta the result; k1 and k3 are Schulman's estimates
    of a divergence. ``ratio_*`` and the fractions are of the last iteration, each train step as
    it was before it moved the model. Statistics of mu are over the tokens whose mu is known; where
    none is, a ratio is 1 and a divergence 0.
    """

    # how much was trained
    training_loss: float  # mean over train steps
    train_steps: int  # that moved the model: one whose tokens are all masked does not
    iterations: int
    stopped_early: bool
    trained_trajectories: int
    groups_without_signal: int  # whose scores do not differ
    calls: int
    tokens: int
    loss_mass_min: float  # a trajectory's share of the loss, before masks; 1 is the mean
    loss_mass_max: float

    # where the tokens came from
    calls_without_logprobs: int
    calls_recomputed: int  # their mu comes from their policy's checkpoint
    calls_too_stale: int  # left out
    staleness_0: int  # calls of the parent itself
    staleness_1: int
    staleness_2: int
    staleness_unknown: int
    logprob_mismatch: float  # mean |log p - log mu| of logged calls of the parent itself
    kl_before: float  # k3(mu || p): how stale the window was
    k1_before: float
    ess: float  # (sum w)^2 / (n sum w^2) of w before truncation, as a share
    importance_mean: float  # w = pi_p / mu before truncation
    importance_p1: float
    importance_p99: float
    importance_max: float

    # how far the update went
    kl_after: float  # k3(p || theta)
    k1_after: float
    kl_behaviour: float  # k3(mu || theta)
    k1_behaviour: float
    kl_reference: float  # k3(theta || reference); 0 without a KL penalty
    k1_reference: float
    ratio_mean: float  # r = pi_theta / pi_p
    ratio_p1: float
    ratio_p99: float
    ratio_max: float
    clip_fraction: float
    clip_low_fraction: float
    clip_high_fraction: float
    masked_fraction: float  # by any of the three reasons below, which may overlap
    masked_band: float
    masked_negative: float
    masked_impossible: float
    entropy: float
    grad_norm: float  # mean over train steps, before clipping
    update_norm: float  # of what is tuned, relative to the norm it had
    learning_rate: float  # of the last train step

    # what it cost
    flat_tokens: int  # of the window, were every call forwarded alone
    unique_tokens: int
    lost_tokens: int  # that a better order of the prompts' segments would share
    sharing_advice: str | None  # where the prompts part too early; None when nothing is lost
    packing_ratio: float  # flat / unique
    training_s: float  # train steps alone
    unique_tokens_per_s: float
    trained_tokens_per_s: float
    oom_halvings: int
    max_tokens: int  # of a portion, in the end
    activation_checkpointing: bool


TIMINGS = ("training_s", "unique_tokens_per_s", "trained_tokens_per_s")
"""The fields that differ between two runs of the same update."""

"""The figures of an update, as one flat record for Postgres, W&B and the flow's artifact."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """The figures of an update.

    Fractions are shares of the trained tokens and divergences are nats a token, unless noted
    otherwise. mu is the behaviour policy that sampled the tokens, p the parent and theta the
    result. k1 and k3 are Schulman's estimates of a divergence. ``ratio_*`` and the fractions are
    from the last iteration, each call's before its train step moved the model. Statistics of mu
    cover the tokens with known mu; without any, ratios are 1 and divergences 0.
    """

    # amount of training
    training_loss: float  # mean over train steps
    train_steps: int  # that moved the model: a step of masked tokens only does not
    iterations: int
    iterations_undone: int  # they moved the policy beyond its bounds
    stopped_early: bool
    trained_trajectories: int
    groups_without_signal: int  # groups of equal scores
    calls: int
    tokens: int
    loss_mass_min: float  # a trajectory's share of the loss before masks, relative to the mean
    loss_mass_max: float

    # source of the tokens
    calls_without_logprobs: int
    calls_too_stale: int  # left out
    staleness_0: int  # calls sampled from the parent
    staleness_1: int
    staleness_2: int
    staleness_unknown: int
    logprob_mismatch: float  # mean |log p - log mu| of logged calls sampled from the parent
    calls_of_other_weights: int  # sampled from the parent, with logprobs that are not the parent's
    kl_before: float  # k3(mu || p): staleness of the window
    k1_before: float
    ess: float  # (sum w)^2 / (n sum w^2), w before truncation
    importance_mean: float  # w = pi_p / mu before truncation
    importance_p1: float
    importance_p99: float
    importance_max: float

    # distance that the policy moved
    kl_after: float  # k3(p || theta)
    kl_limit: float  # beyond it the update must not serve
    k1_after: float
    kl_behaviour: float  # k3(mu || theta)
    k1_behaviour: float
    kl_reference: float  # k3(theta || reference); 0 without a KL penalty
    k1_reference: float
    calls_with_words: int  # 0 without self-distillation
    teacher_before: float  # mean |log p - log teacher| over their tokens; 0 without a teacher
    teacher_after: float  # mean |log theta - log teacher|
    ratio_mean: float  # r = pi_theta / pi_p
    ratio_p1: float
    ratio_p99: float
    ratio_max: float
    clip_fraction: float
    clip_low_fraction: float
    clip_high_fraction: float
    masked_fraction: float  # for any of the three reasons below, which can overlap
    masked_band: float
    masked_negative: float
    masked_impossible: float
    entropy: float
    grad_norm: float  # mean over train steps, before clipping
    update_norm: float  # norm of the tuned weights' change, relative to their norm before
    learning_rate: float  # of the last train step

    # cost
    flat_tokens: int  # input tokens of all calls, each counted alone
    unique_tokens: int  # input tokens with shared prefixes counted once
    lost_tokens: int  # unique tokens that another order of the prompts' text would share
    sharing_advice: str | None  # on the order of the prompts' text; None: little is lost
    packing_ratio: float  # flat / unique
    training_s: float  # of the train steps
    unique_tokens_per_s: float
    trained_tokens_per_s: float
    oom_halvings: int
    max_tokens: int  # of a portion, at the end
    activation_checkpointing: bool

"""What the figures of an update say: which of them rule it out, which deserve a look, and a table.

The figures are those of ``babylon.training.grpo.train_report`` under their own names; a trainer
that does not measure one is not held to it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MAX_LOGPROB_MISMATCH = 0.1  # nats a token
MIN_ESS = 0.3  # share of the tokens
MANY_MASKED = 0.2  # share of the tokens
MUCH_LOST = 0.1  # share of the forwarded tokens

KEY_FIGURES = {
    "avg_reward": "mean score of the window's trajectories",
    "training_loss": "mean over train steps",
    "trained_trajectories": "that moved the policy",
    "tokens": "trained",
    "train_steps": "optimiser updates",
    "logprob_mismatch": "nats a token between the parent's logprobs and those that it logged",
    "ess": "effective sample size of the importance weights, share of the tokens",
    "kl_before": "nats a token from the policies that played to the parent",
    "kl_after": "nats a token from the parent to the result",
    "clip_fraction": "of the tokens",
    "masked_fraction": "of the tokens",
    "entropy": "nats a token",
    "grad_norm": "before clipping",
    "update_norm": "of what is tuned, relative to its norm",
    "packing_ratio": "tokens of all calls / tokens that were forwarded",
    "unique_tokens_per_s": "forwarded in train steps",
}


def ruled_out(metrics: Mapping[str, Any]) -> str | None:
    """Why an update must not serve, however well it plays, or None.

    The gradient was weighted by logged logprobs. Where those are not the sampling policy's own, or
    a few tokens carry all the weight, what was learnt is an accident, and so is how it plays on a
    few hundred scenarios. A figure that is there and not finite (None) is as bad as can be.
    """
    mismatch, ess = metrics.get("logprob_mismatch", 0.0), metrics.get("ess", 1.0)
    if mismatch is None or mismatch > MAX_LOGPROB_MISMATCH:
        return (
            f"logprob mismatch {figure(mismatch)} nat, allowed is {MAX_LOGPROB_MISMATCH:g}: the"
            " logged logprobs are not those that the same policy gives in training; compare"
            " weights, precision and tokenizer of engine and trainer"
        )
    if ess is None or ess < MIN_ESS:
        return (
            f"effective sample size {figure(ess)} of the tokens, needed is {MIN_ESS:g}: the window"
            " was played by policies too far from the one that was trained on it; lower"
            " MAX_STALENESS, or train windows sooner after they are played"
        )
    return None


def warnings(metrics: Mapping[str, Any]) -> Iterator[str]:
    """What somebody should look at, worst first; each says what to do."""
    values = {name: value for name, value in metrics.items() if value is not None}
    if reason := ruled_out(metrics):
        yield f"Not to be promoted: {reason}."
    if stale := values.get("calls_too_stale"):
        yield f"{stale} calls were left out as too stale: train sooner, or raise MAX_STALENESS."
    if unknown := values.get("calls_without_logprobs"):
        yield (
            f"{unknown} of {values['calls']} calls have no logged logprobs and count with weight"
            " one: play through the gateway."
        )
    elif values.get("staleness_0") == 0:
        yield (
            "No call is of the parent itself, so logprob_mismatch was not measured: train sooner to"
            " compare engine and trainer."
        )
    if values.get("masked_impossible"):
        yield (
            f"{values['masked_impossible']:.1%} of the tokens are in calls that the parent finds"
            " impossible: usually another tokenizer or another policy wrote them."
        )
    if (masked := values.get("masked_fraction", 0.0)) > MANY_MASKED:
        yield f"{masked:.1%} of the tokens were masked: the policy moves too far; lower ITERATIONS."
    if values.get("stopped_early"):
        yield (
            f"Stopped early, after iteration {values['iterations']}: the policy had moved far"
            " enough; lower LEARNING_RATE or ITERATIONS."
        )
    if halvings := values.get("oom_halvings"):
        yield (
            f"Memory ran out {halvings} times: set MAX_TOKENS={values['max_tokens']}, with which"
            " it went through."
        )
    lost = values.get("lost_tokens", 0) / max(1, values.get("unique_tokens", 1))
    if lost > MUCH_LOST:
        where = f": {advice}" if (advice := values.get("sharing_advice")) else ""
        yield (
            f"{lost:.0%} of the forwarded tokens are copies that prompts would share if what is"
            f" common to agents came before what is private{where}."
        )


def update_markdown(
    window_id: str, policy_version: int, parent_version: int, metrics: Mapping[str, Any]
) -> str:
    """The update as a page: warnings, key figures, then everything."""
    notes = [f"- ⚠ {warning}" for warning in warnings(metrics)]
    values = {name: figure(value).replace("|", "\\|") for name, value in in_order(metrics).items()}
    key = {name: values.pop(name) for name in KEY_FIGURES if name in values}
    return "\n".join(
        [
            f"# Window {window_id}: policy {parent_version} became {policy_version}",
            "",
            *notes,
            "",
            "| figure | value | |",
            "| --- | ---: | --- |",
            *(f"| {name} | {value} | {KEY_FIGURES[name]} |" for name, value in key.items()),
            "",
            "| metric | value |",
            "| --- | ---: |",
            *(f"| {name} | {value} |" for name, value in values.items()),
        ]
    )


def in_order(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Key figures first, then the others by name."""
    names = [name for name in KEY_FIGURES if name in metrics]
    return {name: metrics[name] for name in [*names, *sorted(set(metrics) - set(names))]}


def figure(value: object) -> str:
    """A number as a person reads it: four digits are enough, and integers are whole."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)

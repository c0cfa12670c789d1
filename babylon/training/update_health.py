"""Health of an update: figures that reject it, warnings, and a page that shows all of them.

Figures have the names of ``babylon.training.grpo.train_report``. A figure that the trainer did not
report is not checked.
"""

from collections.abc import Iterator, Mapping

MAX_LOGPROB_MISMATCH = 0.1  # nats a token
NOTED_LOGPROB_MISMATCH = 0.03  # nats a token; an engine that computes in 16 bits stays below
MIN_ESS = 0.3  # share of the tokens
MAX_FORGOTTEN = 0.1  # nats a token of the chats of RECALL_CHATS
MANY_MASKED = 0.2  # share of the tokens
MUCH_LOST = 0.1  # share of the forwarded tokens

KEY_FIGURES = {
    "avg_reward": "mean score of the window's trajectories",
    "training_loss": "mean over train steps",
    "trained_trajectories": "trajectories that moved the policy",
    "tokens": "trained tokens",
    "train_steps": "optimiser updates",
    "logprob_mismatch": "nats a token between the parent's logprobs and the logged ones",
    "ess": "effective sample size of the importance weights in use, share of the tokens",
    "kl_before": "nats a token from the behaviour policies to the parent",
    "kl_after": "nats a token from the parent to the result",
    "clip_fraction": "share of the tokens",
    "masked_fraction": "share of the tokens",
    "entropy": "nats a token",
    "grad_norm": "before clipping",
    "recall": "nats a token of the chats that must not be forgotten",
    "update_norm": "change of the tuned weights, relative to their norm",
    "pairs": "pairs of replies that were compared",
    "margin_after": "nats by which better replies gained on worse ones",
    "packing_ratio": "tokens of all calls / forwarded tokens",
    "unique_tokens_per_s": "forwarded tokens a second, in train steps",
}


def ruled_out(metrics: Mapping[str, object]) -> str | None:
    """The reason why an update must not serve, however well it plays, or None.

    The gradient was weighted by logged logprobs. If they are not the sampling policy's own, or if a
    few tokens carry all the weight, the update is noise, and its result in the arena is chance. A
    figure that is present but not finite (None) rejects the update.
    """
    figures = _numbers(metrics)
    mismatch, ess = figures.get("logprob_mismatch", 0.0), figures.get("ess", 1.0)
    if mismatch is None or mismatch > MAX_LOGPROB_MISMATCH:
        return (
            f"logprob mismatch {figure(mismatch)} nat, allowed is {MAX_LOGPROB_MISMATCH:g}: the"
            " logged logprobs differ from those of the same policy in the trainer; compare"
            " weights, precision and tokenizer of engine and trainer"
        )
    if ess is None or ess < MIN_ESS:
        return (
            f"effective sample size {figure(ess)} of the tokens, needed is {MIN_ESS:g}: the window"
            " was played by policies too far from the parent; lower MAX_STALENESS, or train windows"
            " sooner after they are played"
        )
    # Undoing returns to states that only the step after them has measured. W&B's trainer has no
    # limit, and does not always report how far it moved.
    moved, limit = figures.get("kl_after", 0.0), figures.get("kl_limit", 0.0)
    if "kl_limit" in figures and (moved is None or limit is None or moved > limit):
        return (
            f"the update moved the policy by {figure(moved)} nats a token, allowed is"
            f" {figure(limit)}: lower LEARNING_RATE, or raise BATCH_SIZE"
        )
    recall, best = figures.get("recall", 0.0), figures.get("recall_best", 0.0)
    if recall is None or best is None or recall > best + MAX_FORGOTTEN:
        return (
            f"forgotten: the chats of RECALL_CHATS cost {figure(recall)} nats a token, the best"
            f" policy of the line {figure(best)}; allowed is {MAX_FORGOTTEN:g} more. Train with"
            " KL_PENALTY, or a lower LEARNING_RATE"
        )
    return None


def warnings(metrics: Mapping[str, object]) -> Iterator[str]:
    """Warnings with their remedies, worst first."""
    values = {name: value for name, value in _numbers(metrics).items() if value is not None}
    if reason := ruled_out(metrics):
        yield f"Not to be promoted: {reason}."
    elif (mismatch := values.get("logprob_mismatch", 0.0)) > NOTED_LOGPROB_MISMATCH:
        yield (
            f"Logprob mismatch {figure(mismatch)} nat: the engine answers with other weights than"
            " the parent's, or in a coarse precision; restart it, and compare its checkpoint."
        )
    if others := values.get("calls_of_other_weights"):
        yield (
            f"{others} of {values.get('staleness_0')} calls of the parent have logprobs of other"
            " weights: the engine mixed up policies while it loaded one; restart it, and update"
            " vLLM."
        )
    if stale := values.get("calls_too_stale"):
        yield f"{stale} calls were left out as too stale: train sooner, or raise MAX_STALENESS."
    if unknown := values.get("calls_without_logprobs"):
        yield (
            f"{unknown} of {values['calls']} calls have no logged logprobs and are trained with"
            " importance weight one: play through the gateway."
        )
    elif values.get("staleness_0") == 0:
        yield (
            "No call was sampled from the parent, so logprob_mismatch was not measured: train"
            " sooner to compare engine and trainer."
        )
    if values.get("masked_impossible"):
        yield (
            f"{values['masked_impossible']:.1%} of the tokens are in calls that are impossible"
            " under the parent: usually another tokenizer or another policy wrote them."
        )
    if (masked := values.get("masked_fraction", 0.0)) > MANY_MASKED:
        yield f"{masked:.1%} of the tokens were masked: the policy moves too far; lower ITERATIONS."
    if undone := values.get("iterations_undone"):
        times = "once" if undone == 1 else f"{undone:g} times"
        yield f"Iterations moved the policy too far and were undone {times}: lower LEARNING_RATE."
    elif values.get("stopped_early"):
        yield (
            f"Stopped early, after iteration {values['iterations']}: the policy moved too far;"
            " lower LEARNING_RATE or ITERATIONS."
        )
    if halvings := values.get("oom_halvings"):
        yield (
            f"Memory ran out {halvings} times: set MAX_TOKENS={values['max_tokens']}, which was"
            " small enough."
        )
    lost = values.get("lost_tokens", 0) / max(1, values.get("unique_tokens", 1))
    if lost > MUCH_LOST:
        where = f": {advice}" if (advice := metrics.get("sharing_advice")) else ""
        yield (
            f"{lost:.0%} of the forwarded tokens are copies that prompts would share if text common"
            f" to agents came before private text{where}."
        )


def update_markdown(
    window_id: str, policy_version: int, parent_version: int, metrics: Mapping[str, object]
) -> str:
    """The update as a Markdown page: warnings, key figures, then all other metrics."""
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


def in_order(metrics: Mapping[str, object]) -> dict[str, object]:
    """The metrics, key figures first, then the others by name."""
    names = [name for name in KEY_FIGURES if name in metrics]
    return {name: metrics[name] for name in [*names, *sorted(set(metrics) - set(names))]}


def figure(value: object) -> str:
    """Format a value for people: floats with four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _numbers(metrics: Mapping[str, object]) -> dict[str, float | None]:
    return {n: v for n, v in metrics.items() if v is None or isinstance(v, (int, float))}

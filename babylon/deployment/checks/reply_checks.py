"""Checks of a policy's replies. Each takes numbers and returns one line, with the remedy if it
fails."""

import math
from collections.abc import Iterator, Sequence

from babylon.core.text import redact
from babylon.deployment.checks.check_result import Check
from babylon.deployment.checks.golden_prompts import GoldenPrompt
from babylon.deployment.checks.likelihoods import BASE, CHAMPION, CheckedReply, Likelihoods
from babylon.deployment.checks.logprob_gap import FINE, Gap, Tolerance, is_nearer_to_other, k3
from babylon.deployment.checks.reply_forms import ALPHA, chance_of_more, has_form

_EXAMPLE = 80  # characters
_RAREST = 1e-12  # the chance of many replies may be smaller than any float


def check_replies(
    measured: Likelihoods, golden: Sequence[GoldenPrompt], *, allowed: Tolerance, max_kl: float
) -> Iterator[Check]:
    """Run every check. Stop after the first if some logprobs are not finite."""
    finite = _finite(measured)
    yield finite
    if not finite.passed:
        return
    yield _served(measured)
    yield _agrees(measured, allowed)
    yield _learned(measured)
    yield _kl(measured, max_kl)
    yield _form(measured, golden)


def _finite(measured: Likelihoods) -> Check:
    lists = {"engine": measured.engine, "policy": measured.own, **measured.others}
    bad = {who: sum(not math.isfinite(x) for x in scores) for who, scores in lists.items()}
    failure = None
    if any(bad.values()):
        told = ", ".join(f"{count} by the {who}" for who, count in bad.items() if count)
        failure = (
            f"of {len(measured.own)} tokens some logprobs are not finite ({told}): the weights are"
            " damaged; train it again with a lower LEARNING_RATE"
        )
    return Check.of("finite", failure, f"logprobs of {len(measured.own)} tokens", **bad)


def _served(measured: Likelihoods) -> Check:
    """Refuse an engine that serves the champion or the base under the policy's name."""
    failure = None
    for gateway, part in measured.of_gateways():
        engine, own = measured.engine[part], measured.own[part]
        for name, scores in measured.others.items():
            if failure is None and is_nearer_to_other(engine, own, scores[part]):
                failure = (
                    f"the engine of gateway {gateway} serves the {name} under the policy's name:"
                    f" its logprobs are {Gap.of(engine, scores[part]).mean:.2g} nats a token from"
                    f" the {name}'s, {Gap.of(engine, own).mean:.2g} from the policy's; restart it"
                )
    apart = {
        f"to_{name}": Gap.of(measured.own, scores).mean for name, scores in measured.others.items()
    }
    return Check.of("served", failure, "each engine serves the policy's own weights", **apart)


def _agrees(measured: Likelihoods, allowed: Tolerance) -> Check:
    """Compare the engine's logprobs with the trainer's. Training needs them to agree."""
    gaps = {
        gateway: Gap.of(measured.engine[part], measured.own[part])
        for gateway, part in measured.of_gateways()
    }
    worst = max(gaps, key=lambda gateway: gaps[gateway].mean / allowed.mean)
    wrong = [gateway for gateway, gap in gaps.items() if not gap.within(allowed)]
    shown = wrong[0] if wrong else worst
    gap = gaps[shown]
    told = (
        f"engine and trainer differ by {gap.mean:.2g} nats a token, {gap.most:.2g} at most (allowed"
        f" {allowed.mean:g} and {allowed.most:g})"
    )
    failure = None
    if wrong:
        rounded = (
            "" if allowed == FINE else ", or have it compute in fp32 (VLLM_ARGS='--dtype float32')"
        )
        failure = (
            f"{told} at gateway {shown}: compare weights, precision and tokenizer of engine and"
            f" trainer, and restart the engine{rounded}"
        )
    return Check.of("agrees", failure, told, mean=gap.mean, most=gap.most, allowed=allowed.mean)


def _learned(measured: Likelihoods) -> Check:
    if BASE in measured.absent:
        return Check.of("learned", None, f"not measured: {measured.absent[BASE]}")
    gap = Gap.of(measured.own, measured.others[BASE])
    failure = None
    if gap.most == 0.0:
        failure = (
            f"every logprob of {len(measured.own)} tokens is the base model's: nothing was learned;"
            " raise LEARNING_RATE or ITERATIONS"
        )
    found = f"differs from the base by {gap.mean:.2g} nats a token"
    return Check.of("learned", failure, found, mean=gap.mean, most=gap.most)


def _kl(measured: Likelihoods, bound: float) -> Check:
    """Bound KL(policy || champion), estimated on tokens that the policy drew."""
    if CHAMPION in measured.absent:
        return Check.of("kl", None, f"not measured: {measured.absent[CHAMPION]}")
    kl = k3(measured.own, measured.others[CHAMPION])
    told = f"KL to the champion is {kl:.3g} nats a token, allowed is {bound:g}"
    failure = None
    if not kl <= bound:
        failure = (
            f"{told}: it answers unlike the champion; lower LEARNING_RATE or ITERATIONS, or"
            " raise MAX_SERVING_KL"
        )
    return Check.of("kl", failure, told, kl=kl, bound=bound, tokens=len(measured.own))


def _form(measured: Likelihoods, golden: Sequence[GoldenPrompt]) -> Check:
    """Compare the share of malformed replies with the champion's on the same questions."""
    replies, champions = (
        _malformed(measured.replies, golden),
        _malformed(measured.champions, golden),
    )
    if not (replies and champions):
        return Check.of("form", None, "not measured: every reply may have been cut off")
    bad, champions_bad = (
        [text for text in replies if text is not None],
        sum(text is not None for text in champions),
    )
    chance = chance_of_more(len(bad), len(replies), champions_bad, len(champions))
    told = (
        f"{len(bad)} of {len(replies)} replies are malformed, of the champion's {champions_bad} of"
        f" {len(champions)}"
    )
    failure = None
    if chance < ALPHA:  # a test, because the shares of few replies differ by chance
        failure = (
            f"{told}; chance alone gives so many at most once in {1 / max(chance, _RAREST):,.0f}"
            f" times. One of them: {redact(bad[0])[:_EXAMPLE]!r}; train it further, or train"
            " the champion again with a lower LEARNING_RATE"
        )
    return Check.of(
        "form",
        failure,
        told,
        malformed=len(bad),
        replies=len(replies),
        champions_malformed=champions_bad,
        champions_replies=len(champions),
        chance=chance,
    )


def _malformed(replies: Sequence[CheckedReply], golden: Sequence[GoldenPrompt]) -> list[str | None]:
    """For each reply whose prompt has a form: its text if it lacks the form, else ``None``."""
    with_form = [(reply.answer, form) for reply in replies if (form := golden[reply.prompt].form)]
    return [
        None if answer.ended and has_form(answer.text, form) else answer.text
        for answer, form in with_form
    ]

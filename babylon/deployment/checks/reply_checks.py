"""The checks of what was seen: each takes numbers and gives one line, with the remedy where it
fails."""

import math
from collections.abc import Iterator, Sequence

from babylon.core.text import redact
from babylon.deployment.checks.check_result import Check
from babylon.deployment.checks.golden_prompts import GoldenPrompt
from babylon.deployment.checks.likelihoods import BASE, CHAMPION, Reply, Seen
from babylon.deployment.checks.logprob_gap import FINE, Gap, Tolerance, is_rather, k3
from babylon.deployment.checks.reply_forms import ALPHA, chance_of_more, has_form

_EXAMPLE = 80  # characters


def judge(
    seen: Seen, golden: Sequence[GoldenPrompt], *, allowed: Tolerance, max_kl: float
) -> Iterator[Check]:
    """All of them; after numbers that are none, no others."""
    finite = _finite(seen)
    yield finite
    if not finite.passed:
        return
    yield _served(seen)
    yield _agrees(seen, allowed)
    yield _learned(seen)
    yield _kl(seen, max_kl)
    yield _form(seen, golden)


def _finite(seen: Seen) -> Check:
    lists = {"engine": seen.engine, "policy": seen.own, **seen.others}
    bad = {who: sum(not math.isfinite(x) for x in scores) for who, scores in lists.items()}
    failure = None
    if any(bad.values()):
        told = ", ".join(f"{count} by the {who}" for who, count in bad.items() if count)
        failure = (
            f"of {len(seen.own)} tokens some logprobs are not finite ({told}): the weights are"
            " damaged; train it again with a lower LEARNING_RATE"
        )
    return Check.of("finite", failure, f"logprobs of {len(seen.own)} tokens", **bad)


def _served(seen: Seen) -> Check:
    """No gateway's engine serves the champion or the base under the policy's name."""
    failure = None
    for gateway, part in seen.of_gateways():
        engine, own = seen.engine[part], seen.own[part]
        for name, scores in seen.others.items():
            if failure is None and is_rather(engine, own, scores[part]):
                failure = (
                    f"the engine of gateway {gateway} serves the {name} under the policy's name:"
                    f" its logprobs are {Gap.of(engine, scores[part]).mean:.2g} nats a token from"
                    f" the {name}'s, {Gap.of(engine, own).mean:.2g} from the policy's; restart it"
                )
    apart = {f"to_{name}": Gap.of(seen.own, scores).mean for name, scores in seen.others.items()}
    return Check.of("served", failure, "each engine serves the policy's own weights", **apart)


def _agrees(seen: Seen, allowed: Tolerance) -> Check:
    """Engine and trainer compute the same, so that what is recorded can be trained on."""
    gaps = {
        gateway: Gap.of(seen.engine[part], seen.own[part]) for gateway, part in seen.of_gateways()
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


def _learned(seen: Seen) -> Check:
    if BASE in seen.absent:
        return Check.of("learned", None, f"not measured: {seen.absent[BASE]}")
    gap = Gap.of(seen.own, seen.others[BASE])
    failure = None
    if gap.most == 0.0:
        failure = (
            f"every logprob of {len(seen.own)} tokens is the base model's: nothing was learned;"
            " raise LEARNING_RATE or ITERATIONS"
        )
    found = f"differs from the base by {gap.mean:.2g} nats a token"
    return Check.of("learned", failure, found, mean=gap.mean, most=gap.most)


def _kl(seen: Seen, bound: float) -> Check:
    """KL(policy || champion), estimated on tokens that the policy itself drew."""
    if CHAMPION in seen.absent:
        return Check.of("kl", None, f"not measured: {seen.absent[CHAMPION]}")
    kl = k3(seen.own, seen.others[CHAMPION])
    told = f"KL to the champion is {kl:.3g} nats a token, allowed is {bound:g}"
    failure = None
    if not kl <= bound:
        failure = (
            f"{told}: it answers unlike the champion; lower LEARNING_RATE or ITERATIONS, or, if"
            " that is wanted, raise MAX_SERVING_KL"
        )
    return Check.of("kl", failure, told, kl=kl, bound=bound, tokens=len(seen.own))


def _form(seen: Seen, golden: Sequence[GoldenPrompt]) -> Check:
    """Not fewer well-formed replies than the champion gives to the same questions."""
    replies, champions = _malformed(seen.replies, golden), _malformed(seen.champions, golden)
    if not (replies and champions):
        return Check.of("form", None, "not measured: no reply that can be told from a cut one")
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
    if chance < ALPHA:
        failure = (
            f"{told}; by chance so many are seen once in {1 / chance:,.0f} times. One of them:"
            f" {redact(bad[0])[:_EXAMPLE]!r}; train it on, or train the champion again with a lower"
            " LEARNING_RATE"
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


def _malformed(replies: Sequence[Reply], golden: Sequence[GoldenPrompt]) -> list[str | None]:
    """Of each reply that is held to a form: its text if it lacks that, else None."""
    judged = [(reply.answer, form) for reply in replies if (form := golden[reply.prompt].form)]
    return [
        None if answer.ended and has_form(answer.text, form) else answer.text
        for answer, form in judged
    ]

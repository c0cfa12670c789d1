"""Logprobs of the policy's replies under policy, champion and base, one model at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from babylon.core.errors import ModelError
from babylon.core.learning_settings import Precision
from babylon.core.probes import ProbeAnswer
from babylon.deployment.checks.probing import Probe

CHAMPION, BASE = "champion", "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """Checkpoints to compare. ``base`` is ``None`` for the base model's own policy.

    ``max_tokens``: tokens computed at once. ``precision``: of frozen weights, as in the trainer.
    """

    policy: str
    champion: str
    base: str | None
    max_tokens: int | None
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedReply:
    """A policy's answer to a golden prompt."""

    prompt: int
    gateway: str
    answer: ProbeAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihoods:
    """``replies`` of the policy, gateway by gateway, and the champion's to the same questions.

    ``own`` ``[N]``: the trainer's logprobs of every token of ``replies`` under the policy.
    ``others``: the same under the champion and the base. ``absent``: the reason for a missing one.
    """

    replies: Sequence[CheckedReply]
    champions: Sequence[CheckedReply]
    own: Sequence[float]
    others: Mapping[str, Sequence[float]]
    absent: Mapping[str, str]

    @property
    def engine(self) -> list[float]:
        """The engine's logprobs ``[N]``, with which the tokens were sampled."""
        return [score for reply in self.replies for score in reply.answer.logprobs]

    def of_gateways(self) -> Iterator[tuple[str, slice]]:
        """Yield each gateway with its slice of the N tokens."""
        start = 0
        for gateway, replies in groupby(self.replies, key=lambda reply: reply.gateway):
            end = start + sum(len(reply.answer.token_ids) for reply in replies)
            yield gateway, slice(start, end)
            start = end


def import_trainer() -> None:
    """Import torch and transformers, which takes seconds."""
    import babylon.training.likelihood  # noqa: F401


def measure(contenders: Contenders, probes: Sequence[Probe]) -> Likelihoods:
    """Compute the logprobs. Blocking: loads each model once.

    Raises:
        ModelError: The policy does not load.
    """
    from babylon.training.likelihood import logprobs_of

    replies = _replies(probes, "policy")
    given = [reply.answer for reply in replies]

    def score(uri: str) -> list[float]:
        return logprobs_of(uri, given, contenders.max_tokens, contenders.precision)

    known = {contenders.policy: score(contenders.policy)}
    others, absent = dict[str, Sequence[float]](), dict[str, str]()
    for name, uri in ((CHAMPION, contenders.champion), (BASE, contenders.base)):
        if uri is None:
            absent[name] = "it is the base model itself"
            continue
        try:
            others[name] = known[uri] = known.get(uri) or score(uri)
        except ModelError as error:  # no fault of the policy, so it does not fail the check
            absent[name] = str(error)
    return Likelihoods(
        replies=replies,
        champions=_replies(probes, CHAMPION),
        own=known[contenders.policy],
        others=others,
        absent=absent,
    )


def _replies(probes: Sequence[Probe], who: str) -> list[CheckedReply]:
    return [
        CheckedReply(prompt=probe.prompt, gateway=probe.gateway, answer=answer)
        for probe in probes
        if isinstance(answer := getattr(probe, who), ProbeAnswer)
    ]

"""What was said, and how likely policy, champion and base each make it: one model at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from babylon.core.errors import ModelError
from babylon.core.probes import ProbeAnswer
from babylon.deployment.checks.probing import Probe
from babylon.policies.checkpoint_files import local_path

CHAMPION, BASE = "champion", "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """Where the checkpoints lie; the base model's own policy has no ``base``."""

    policy: str
    champion: str
    base: str | None
    max_tokens: int | None  # of a portion of the forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A policy's answer to a golden prompt."""

    prompt: int
    gateway: str
    answer: ProbeAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """``replies`` are the policy's, gateway by gateway, ``champions`` the champion's to the same
    questions.

    ``own`` ``[N]`` are the trainer's logprobs of every token of ``replies`` under the policy,
    ``others`` those under the champion and the base; ``absent`` says why one is missing.
    """

    replies: Sequence[Reply]
    champions: Sequence[Reply]
    own: Sequence[float]
    others: Mapping[str, Sequence[float]]
    absent: Mapping[str, str]

    @property
    def engine(self) -> list[float]:
        """``[N]`` as they were sampled."""
        return [score for reply in self.replies for score in reply.answer.logprobs]

    def of_gateways(self) -> Iterator[tuple[str, slice]]:
        """Each gateway with its part of the N tokens."""
        start = 0
        for gateway, replies in groupby(self.replies, key=lambda reply: reply.gateway):
            end = start + sum(len(reply.answer.token_ids) for reply in replies)
            yield gateway, slice(start, end)
            start = end


def import_trainer() -> None:
    """Blocking, seconds."""


def look(contenders: Contenders, probes: Sequence[Probe]) -> Seen:
    """Blocking: loads each model once.

    Raises:
        ModelError: the policy does not load.
    """
    from babylon.training.likelihood import logprobs_of

    replies = _replies(probes, "policy")
    given = [reply.answer for reply in replies]

    def likely(uri: str) -> list[float]:
        return logprobs_of(str(local_path(uri)), given, contenders.max_tokens)

    known = {contenders.policy: likely(contenders.policy)}
    others, absent = dict[str, Sequence[float]](), dict[str, str]()
    for name, uri in ((CHAMPION, contenders.champion), (BASE, contenders.base)):
        if uri is None:
            absent[name] = "it is the base model itself"
            continue
        try:
            others[name] = known[uri] = known.get(uri) or likely(uri)
        except ModelError as error:
            absent[name] = str(error)
    return Seen(
        replies=replies,
        champions=_replies(probes, CHAMPION),
        own=known[contenders.policy],
        others=others,
        absent=absent,
    )


def _replies(probes: Sequence[Probe], who: str) -> list[Reply]:
    return [
        Reply(prompt=probe.prompt, gateway=probe.gateway, answer=answer)
        for probe in probes
        if isinstance(answer := getattr(probe, who), ProbeAnswer)
    ]

"""What was said, and how likely policy, champion and base each make it: one model at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from babylon.checkpoint_files import adapter_base, is_fp32, local_path
from babylon.deploy.probing import Probe, Question
from babylon.errors import ModelError
from babylon.probes import Answer

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
    """A policy's answer to a golden prompt; without a ``gateway`` it was given in this process."""

    prompt: int
    gateway: str | None
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """``replies`` are the policy's, ``champions`` the champion's to the same questions.

    ``own`` ``[N]`` are the trainer's logprobs of every token of ``replies`` under the policy,
    ``others`` those under the champion and the base; ``absent`` says why one is missing.
    """

    replies: Sequence[Reply]
    champions: Sequence[Reply]
    own: Sequence[float]
    others: Mapping[str, Sequence[float]]
    absent: Mapping[str, str]
    fp32: bool

    @property
    def engine(self) -> list[float]:
        """``[N]`` as they were sampled."""
        return [score for reply in self.replies for score in reply.answer.logprobs]

    def of_gateways(self) -> Iterator[tuple[str, slice]]:
        """Each gateway with its part of the N tokens; nothing when there was none."""
        start = 0
        for gateway, replies in groupby(self.replies, key=lambda reply: reply.gateway):
            end = start + sum(len(reply.answer.token_ids) for reply in replies)
            if gateway is not None:
                yield gateway, slice(start, end)
            start = end


def look(contenders: Contenders, asked: Sequence[Question], probes: Sequence[Probe]) -> Seen:
    """Blocking: loads each model once. Without ``probes``, policy and champion answer here.

    Raises:
        ModelError: the policy does not load, or cannot answer.
    """
    from babylon.checkpoints.trial import try_out  # torch takes seconds to import

    asks = [] if probes else [ask for _, ask in asked]
    probed = _probed(probes, "policy")
    given = [reply.answer for reply in probed]
    drawn, own = try_out(_path(contenders.policy), asks, given, contenders.max_tokens)
    replies = probed or _drawn(asked, drawn)
    given = [reply.answer for reply in replies]
    known = {contenders.policy: (drawn, own)}
    absent = dict[str, str]()
    for name, uri in ((CHAMPION, contenders.champion), (BASE, contenders.base)):
        if uri is None:
            absent[name] = "it is the base model itself"
        elif uri not in known:
            try:
                more = asks if name == CHAMPION else []
                known[uri] = try_out(_path(uri), more, given, contenders.max_tokens)
            except ModelError as error:
                absent[name] = str(error)
    champions = _probed(probes, CHAMPION)
    if not probes and CHAMPION not in absent:
        champions = _drawn(asked, known[contenders.champion][0])
    places = {CHAMPION: contenders.champion, BASE: contenders.base or ""}
    return Seen(
        replies=replies,
        champions=champions,
        own=own,
        others={name: known[uri][1] for name, uri in places.items() if name not in absent},
        absent=absent,
        fp32=is_fp32(adapter_base(contenders.policy) or contenders.policy),
    )


def _path(uri: str) -> str:
    return str(local_path(uri))


def _drawn(asked: Sequence[Question], answers: Sequence[Answer | None]) -> list[Reply]:
    return [
        Reply(prompt=prompt, gateway=None, answer=answer)
        for (prompt, _), answer in zip(asked, answers, strict=True)
        if answer is not None
    ]


def _probed(probes: Sequence[Probe], who: str) -> list[Reply]:
    return [
        Reply(prompt=probe.prompt, gateway=probe.gateway, answer=answer)
        for probe in probes
        if isinstance(answer := getattr(probe, who), Answer)
    ]

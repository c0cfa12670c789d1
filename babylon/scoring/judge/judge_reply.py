"""Parser of the judge's replies. It never guesses or fills in a score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from babylon.scoring.judge.judgment import Method
from babylon.scoring.judge.prompt import Prompt, one_line

T = TypeVar("T")
_MAX_EXPLANATION = 600  # characters


class UnusableReplyError(Exception):
    """A reply that cannot be used. The message completes "that answer cannot be used: "."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """Scores ``[n]`` in [0, 1] and explanations ``[n]``, in the order of the prompt.

    In a preference the winner has 1 and the other 0, and both have the same explanation.
    """

    scores: tuple[float, ...]
    explanations: tuple[str, ...]


class _Entry(msgspec.Struct, frozen=True):
    id: str
    score: float
    explanation: str = ""


class _Listwise(msgspec.Struct, frozen=True):
    scores: list[_Entry]


class _Pairwise(msgspec.Struct, frozen=True):
    winner: str
    explanation: str = ""


class _Pointwise(msgspec.Struct, frozen=True):
    score: float
    explanation: str = ""


def parse_reply(prompt: Prompt, text: str) -> JudgeReply:
    """Return the scores of a reply. Code fences and thoughts around the JSON object are ignored.

    Raises:
        UnusableReplyError: the JSON has another form, its ids are not exactly those of the prompt,
            or a score is not a number in [0, 1].
    """
    return _READERS[prompt.method](prompt.labels, _json_object(text))


def _json_object(text: str) -> bytes:
    text = text.rpartition("</think>")[2]
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise UnusableReplyError(f"it holds no JSON object: {text.strip()[:80]!r}")
    return text[start : end + 1].encode(errors="replace")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnusableReplyError(f"its JSON does not have the requested form ({error})") from error


def _listwise(labels: Sequence[str], body: bytes) -> JudgeReply:
    entries = _decode(body, _Listwise).scores
    names = [entry.id for entry in entries]
    if sorted(names) != sorted(labels):
        raise UnusableReplyError(
            f"it scores the ids {', '.join(names)[:200] or '(none)'},"
            f" not each of {', '.join(labels)} once"
        )
    by_id = {entry.id: entry for entry in entries}
    ordered = [by_id[label] for label in labels]
    return JudgeReply(
        scores=tuple(_unit(entry.score, entry.id) for entry in ordered),
        explanations=tuple(_explained(entry.explanation) for entry in ordered),
    )


def _pairwise(labels: Sequence[str], body: bytes) -> JudgeReply:
    verdict = _decode(body, _Pairwise)
    if verdict.winner not in labels:
        raise UnusableReplyError(
            f"its winner {verdict.winner[:40]!r} is not one of {', '.join(labels)}"
        )
    return JudgeReply(
        scores=tuple(float(label == verdict.winner) for label in labels),
        explanations=(_explained(verdict.explanation),) * len(labels),
    )


def _pointwise(labels: Sequence[str], body: bytes) -> JudgeReply:
    verdict = _decode(body, _Pointwise)
    return JudgeReply(
        scores=(_unit(verdict.score, labels[0]),),
        explanations=(_explained(verdict.explanation),),
    )


def _unit(score: float, label: str) -> float:
    if not 0 <= score <= 1:
        raise UnusableReplyError(f"the score {score} of {label} is not between 0 and 1")
    return score


def _explained(text: str) -> str:
    return one_line(text)[:_MAX_EXPLANATION]


_READERS: dict[Method, Callable[[Sequence[str], bytes], JudgeReply]] = {
    "ruler": _listwise,
    "preference": _pairwise,
    "regression": _pointwise,
}

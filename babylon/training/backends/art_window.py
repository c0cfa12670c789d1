"""A window's rows as ART's trainers may have them: exact calls of groups with signal, no secrets.

ART's loss is for tokens sampled at temperature 1 whose logprobs are known; other calls are left
out and counted. What goes to somebody else's machine is scrubbed first: in a prompt a secret is
replaced, while a reply is made of the very tokens that are trained and cannot be changed, so a
call whose reply holds one is left out. Then everything is looked through once more.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import msgspec

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.redaction import find_secrets, redact
from babylon.core.settings import Settings
from babylon.core.trajectories import Call, Message, TrainingRow
from babylon.training.backends.updater import TrainInput
from babylon.training.grpo.advantage import advantages
from babylon.training.grpo.training_input import ScoredTrajectory
from babylon.training.update import Excluded

_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # how names of such variables end
_TRUNCATING = ("top_p", "top_k", "min_p")  # as the gateway names them
_MIN_SECRET = 8  # characters: shorter values ("postgres") are words


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be sent.

    ``context``: the longest call in tokens. ``stale``: policy versions that are too old.
    ``secrets``: those that are known by value; None: the rows stay on this machine as they are.
    ``decode``: token ids → text; a reply's tokens may say more than its text (reasoning, tools).
    """

    context: int | None
    max_missing_logprobs: float
    stale: Collection[int]
    secrets: Collection[str] | None
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtWindow:
    """Rows that can be sent, and what was left out of them and why."""

    rows: tuple[TrainingRow, ...]
    excluded: Excluded
    calls: int
    tokens: int
    calls_unlogged: int
    calls_too_stale: int
    calls_with_secrets: int
    calls_redacted: int
    groups_without_signal: int

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return tuple(row.trajectory_id for row in self.rows)

    def counts(self) -> dict[str, int]:
        """What an ``ArtReport`` tells beside the trainer's own figures."""
        return {
            "trained_trajectories": len(self.rows),
            "groups_without_signal": self.groups_without_signal,
            "calls": self.calls,
            "tokens": self.tokens,
            "calls_unlogged": self.calls_unlogged,
            "calls_too_stale": self.calls_too_stale,
            "calls_with_secrets": self.calls_with_secrets,
            "calls_redacted": self.calls_redacted,
        }


def art_window(rows: Sequence[TrainingRow], limits: Limits) -> ArtWindow:
    """Choose and scrub.

    Raises:
        WindowNotReadyError: no group with differing scores is left, or too few calls have logprobs.
        TrainingError: a secret would have left the house.
    """
    kept, reasons = _trainable(rows, limits)
    _check_logged(rows, reasons["unlogged"], limits.max_missing_logprobs)
    chosen = _with_signal(kept)
    groups = {row.scenario_id for row in rows}
    if not chosen:
        raise WindowNotReadyError(
            f"none of the {len(groups)} groups ({len(rows)} trajectories) has two members with"
            f" differing scores and a trainable call (left out: {dict(reasons)}): let more agents"
            " play a scenario, through the gateway"
        )
    sent = chosen
    if limits.secrets is not None:
        sent = [_scrubbed(row, limits.secrets) for row in chosen]
        _check_clean(sent, limits.secrets)
    before = [call for row in chosen for call in row.calls]
    calls = [call for row in sent for call in row.calls]
    return ArtWindow(
        rows=tuple(sent),
        excluded=_excluded(reasons),
        calls=len(calls),
        tokens=sum(len(call.completion_token_ids or ()) for call in calls),
        calls_unlogged=reasons["unlogged"],
        calls_too_stale=reasons["stale"],
        calls_with_secrets=reasons["secret"],
        calls_redacted=sum(a.messages != b.messages for a, b in zip(before, calls, strict=True)),
        groups_without_signal=len(groups) - len({row.scenario_id for row in chosen}),
    )


def limits_of(
    work: TrainInput,
    *,
    context: int | None,
    secrets: Collection[str] | None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Limits:
    """The settings' limits, and those of who trains."""
    allowed = work.settings.training.max_staleness
    return Limits(
        context=context,
        max_missing_logprobs=work.settings.training.max_missing_logprobs,
        stale={version for version, age in work.staleness.items() if age > allowed},
        secrets=secrets,
        decode=decode,
    )


def known_secrets(settings: Settings, environment: Mapping[str, str] = os.environ) -> set[str]:
    """Values of this process's own credentials, whatever their form."""
    values = {value for name, value in environment.items() if name.upper().endswith(_SECRET_NAMES)}
    if settings.database.url is not None:
        url = settings.database.url.get_secret_value()
        values |= {url, unquote(urlsplit(url).password or "")}
    return {value for value in values if len(value) >= _MIN_SECRET}


def _check_logged(rows: Sequence[TrainingRow], missing: int, allowed: float) -> None:
    calls = sum(len(row.calls) for row in rows)
    if calls and missing / calls > allowed:
        raise WindowNotReadyError(
            f"{missing} of {calls} calls have no logged tokens and logprobs, allowed are"
            f" {allowed:.0%}: play through the gateway, or raise MAX_MISSING_LOGPROBS"
        )


def _with_signal(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    moved = advantages(
        [
            ScoredTrajectory(
                trajectory_id=row.trajectory_id, group=row.scenario_id, score=row.score, calls=()
            )
            for row in rows
        ]
    )
    return [row for row in rows if row.trajectory_id in moved]


def _excluded(reasons: Counter[str]) -> Excluded:
    return Excluded(
        greedy=reasons["greedy"],
        truncated=reasons["truncated"],
        too_long=reasons["too_long"],
        empty=reasons["empty"],
        untrainable=reasons["untrainable"] + reasons["unlogged"] + reasons["secret"],
    )


def _trainable(
    rows: Sequence[TrainingRow], limits: Limits
) -> tuple[list[TrainingRow], Counter[str]]:
    reasons: Counter[str] = Counter()
    kept = []
    for row in rows:
        calls = []
        for call in row.calls:
            if reason := _obstacle(call, limits):
                reasons[reason] += 1
            else:
                calls.append(call)
        if calls:
            kept.append(msgspec.structs.replace(row, calls=tuple(calls)))
    return kept, reasons


def _obstacle(call: Call, limits: Limits) -> str | None:
    """Why the call cannot be sent, if it cannot."""
    if call.temperature <= 0:
        return "greedy"
    if call.top_p < 1 or any(cut in (call.untrainable or "") for cut in _TRUNCATING):
        return "truncated"
    if call.untrainable is not None or call.temperature != 1:
        return "untrainable"
    if call.policy_version in limits.stale:
        return "stale"
    prompt, completion = call.prompt_token_ids, call.completion_token_ids
    if prompt is None or completion is None or call.logprobs is None:
        return "unlogged"
    if not completion:
        return "empty"
    if limits.context is not None and len(prompt) + len(completion) > limits.context:
        return "too_long"
    if limits.secrets is not None:
        said = call.response if limits.decode is None else limits.decode(completion)
        if find_secrets(call.response, limits.secrets) or find_secrets(said, limits.secrets):
            return "secret"
    return None


def _scrubbed(row: TrainingRow, secrets: Collection[str]) -> TrainingRow:
    calls = (
        msgspec.structs.replace(
            call,
            messages=tuple(
                Message(role=message.role, content=redact(message.content, secrets))
                for message in call.messages
            ),
        )
        for call in row.calls
    )
    return msgspec.structs.replace(row, calls=tuple(calls))


def _check_clean(rows: Sequence[TrainingRow], secrets: Collection[str]) -> None:
    for row in rows:
        for call in row.calls:
            for text in (call.response, *(message.content for message in call.messages)):
                if kinds := find_secrets(text, secrets):
                    raise TrainingError(
                        f"step {call.step} of trajectory {row.trajectory_id} still holds a secret"
                        f" ({', '.join(kinds)}) after redaction: nothing was sent; leave the"
                        " trajectory out, or train with TRAINER=torch"
                    )

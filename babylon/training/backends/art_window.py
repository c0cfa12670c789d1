"""The part of a window that ART's trainers get: exact calls of groups with signal, no secrets.

ART's loss is defined for tokens sampled at temperature 1 with known logprobs. Other calls are left
out and counted. Rows that leave this machine are redacted: secrets in prompts are replaced. The
tokens of a reply are trained and cannot be changed, so a call whose reply holds a secret is left
out. A last check then searches all rows for secrets, and sends nothing if it finds one.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote, urlsplit

import msgspec

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.llm_calls import JsonObject, Message
from babylon.core.settings import DatabaseSettings
from babylon.core.text import find_secrets, redact
from babylon.core.trajectories import Call, TrainingRow
from babylon.training.backends.train_input import TrainInput
from babylon.training.call_tokens import sampling_obstacle
from babylon.training.grpo.advantage import MIN_GROUP_STD, advantages
from babylon.training.grpo.training_input import ScoredTrajectory
from babylon.training.update_result import Excluded

_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # last words of such variables' names
_MIN_SECRET = 8  # characters: shorter values ("postgres") are common words


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtLimits:
    """Limits of what is sent to a trainer.

    ``context``: longest call in tokens. ``stale``: policy versions that are too old. ``secrets``:
    known secret values; None: the rows stay on this machine and are not redacted. ``decode``: token
    ids → text, because a reply's tokens can hold more than its text (reasoning, tools).
    """

    context: int | None
    max_missing_logprobs: float
    stale: Collection[int]
    secrets: Collection[str] | None
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtWindow:
    """Rows to send, and numbers of what is sent and of calls that were left out, by reason."""

    rows: tuple[TrainingRow, ...]
    excluded: Excluded
    counts: dict[str, int]  # the figures of an ``ArtReport`` that we count ourselves

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return tuple(row.trajectory_id for row in self.rows)


def art_window(rows: Sequence[TrainingRow], limits: ArtLimits) -> ArtWindow:
    """Select the trainable calls, and redact secrets.

    Raises:
        WindowNotReadyError: no group with differing scores is left, or too few calls have logprobs.
        TrainingError: a secret is left after redaction.
    """
    kept, reasons = _trainable(rows, limits)
    _check_logged(rows, reasons["unlogged"], limits.max_missing_logprobs)
    chosen = _with_signal(kept)
    groups = {row.scenario_id for row in rows}
    if not chosen:
        raise WindowNotReadyError(
            f"none of the {len(groups)} groups ({len(rows)} trajectories) has two members with"
            f" differing scores and a trainable call (left out: {dict(reasons)}; a standard"
            f" deviation below {MIN_GROUP_STD:g} is a tie): let more agents play a scenario,"
            " through the gateway"
        )
    # Redaction goes by the form of secrets, so its result is checked before it leaves this machine.
    sent = chosen
    if limits.secrets is not None:
        sent = [_redacted(row, limits.secrets) for row in chosen]
        _check_clean(sent, limits.secrets)
    before = [call for row in chosen for call in row.calls]
    calls = [call for row in sent for call in row.calls]
    return ArtWindow(
        rows=tuple(sent),
        excluded=Excluded(
            greedy=reasons["greedy"],
            truncated=reasons["truncated"],
            too_long=reasons["too_long"],
            empty=reasons["empty"],
            untrainable=reasons["untrainable"] + reasons["unlogged"] + reasons["secret"],
        ),
        counts={
            "trained_trajectories": len(sent),
            "groups_without_signal": len(groups) - len({row.scenario_id for row in chosen}),
            "calls": len(calls),
            "tokens": sum(len(call.completion_token_ids or ()) for call in calls),
            "calls_unlogged": reasons["unlogged"],
            "calls_too_stale": reasons["stale"],
            "calls_with_secrets": reasons["secret"],
            "calls_redacted": sum(
                (a.messages, a.tools) != (b.messages, b.tools)
                for a, b in zip(before, calls, strict=True)
            ),
        },
    )


def art_limits(
    work: TrainInput,
    *,
    context: int | None,
    secrets: Collection[str] | None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> ArtLimits:
    """Limits from the settings, and those of the trainer."""
    allowed = work.settings.training.max_staleness
    return ArtLimits(
        context=context,
        max_missing_logprobs=work.settings.training.max_missing_logprobs,
        stale={version for version, age in work.staleness.items() if age > allowed},
        secrets=secrets,
        decode=decode,
    )


def known_secrets(
    database: DatabaseSettings, environment: Mapping[str, str] = os.environ
) -> set[str]:
    """Values of this process's own credentials, of any format."""
    values = {value for name, value in environment.items() if name.upper().endswith(_SECRET_NAMES)}
    if database.url is not None:
        url = database.url.get_secret_value()
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
    scored = [
        ScoredTrajectory(
            trajectory_id=r.trajectory_id, group=r.scenario_id, score=r.score, calls=()
        )
        for r in rows
    ]
    moved = advantages(scored)
    return [row for row in rows if row.trajectory_id in moved]


def _trainable(
    rows: Sequence[TrainingRow], limits: ArtLimits
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


def _obstacle(call: Call, limits: ArtLimits) -> str | None:
    if reason := sampling_obstacle(call):
        return reason
    if call.temperature != 1:
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
        if any(find_secrets(text, limits.secrets) for text in [said, *_texts(call.answer)]):
            return "secret"
    return None


def _redacted(row: TrainingRow, secrets: Collection[str]) -> TrainingRow:
    calls = (
        msgspec.structs.replace(
            call,
            messages=tuple(
                cast(Message, _redacted_json(message, secrets)) for message in call.messages
            ),
            tools=tuple(cast(JsonObject, _redacted_json(tool, secrets)) for tool in call.tools),
        )
        for call in row.calls
    )
    return msgspec.structs.replace(row, calls=tuple(calls))


def _redacted_json(value: object, secrets: Collection[str]) -> object:
    """Return a JSON value with every text in it redacted."""
    if isinstance(value, dict):
        return {
            redact(name, secrets): _redacted_json(item, secrets) for name, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted_json(item, secrets) for item in value]
    return redact(value, secrets) if isinstance(value, str) else value


def _texts(*values: object) -> Iterator[str]:
    """Yield every text in JSON values, keys included."""
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value


def _check_clean(rows: Sequence[TrainingRow], secrets: Collection[str]) -> None:
    for row in rows:
        for call in row.calls:
            for text in _texts(call.answer, *call.messages, *call.tools):
                if kinds := find_secrets(text, secrets):
                    raise TrainingError(
                        f"step {call.step} of trajectory {row.trajectory_id} still holds a secret"
                        f" ({', '.join(kinds)}) after redaction: nothing was sent; leave the"
                        " trajectory out, or train with TRAINER=torch"
                    )

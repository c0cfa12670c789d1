"""Langfuse exports as trajectories: one for each session, or for each trace without a session.

https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields. The exports
differ in two ways only: the interface and the API write ``traceId``, the files of blob storage
``trace_id``, with inputs as JSON texts. Read are: rows of observations and of scores, pages of the
API (``data``), and a trace as the interface downloads it (with ``observations`` and ``scores``).

An observation of type ``GENERATION`` is a call. Numeric and boolean scores become rewards.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from babylon.core.llm_calls import JsonObject
from babylon.formats.captured import (
    CapturedCall,
    CapturedScores,
    captured_traces,
    llm_call,
    moment,
    number,
    whole,
)
from babylon.formats.foreign_messages import decoded, prompt_of, reply_of
from babylon.formats.trace import Document, ImportFileError, LeaveOut, Trace, refuse

_CAPITAL = re.compile(r"(?<=[a-z])[A-Z]")


@dataclass(frozen=True, slots=True)
class _Row:
    place: str
    value: JsonObject

    def text(self, name: str) -> str:
        return str(self.value.get(name) or "")


def is_langfuse(value: JsonObject) -> bool:
    """Return True for a row, a page or a trace of Langfuse."""
    rows = value.get("observations") or value.get("data") or [value]
    first = rows[0] if isinstance(rows, list) and rows else None
    keys = _snake(first).keys() if isinstance(first, dict) else set()
    return {"trace_id", "type", "start_time"} <= keys or {"trace_id", "name", "value"} <= keys


def read_langfuse(
    documents: Iterable[Document], agent_id: str, leave_out: LeaveOut = refuse
) -> Iterator[Trace]:
    """Yield the traces of an export. Generations that failed are left out.

    Raises:
        ImportFileError: a generation cannot be read, unless ``leave_out`` goes on.
    """
    rows = [row for document in documents for row in _rows(document)]
    observations = {row.text("id"): row for row in rows if "start_time" in row.value}
    generations = [row for row in observations.values() if row.value.get("type") == "GENERATION"]
    scores = {row.text("id") or row.place: row for row in rows if "start_time" not in row.value}
    feedback = _feedback(scores.values(), observations)
    calls = []
    for row in generations:
        try:
            calls.append(_call(row, observations))
        except ImportFileError as error:
            leave_out(error)
    yield from captured_traces(feedback.given_to(calls), agent_id)


def _rows(document: Document) -> Iterator[_Row]:
    value = _snake(document.value)
    observations = value.get("observations")
    if isinstance(observations, list):
        about = {
            "trace_id": value.get("id"),
            "session_id": value.get("session_id"),
            "trace_name": value.get("name"),
        }
        scores = value.get("scores")
        rows = [*observations, *(scores if isinstance(scores, list) else [])]
    else:
        about = {}
        data = value.get("data")
        rows = data if isinstance(data, list) else [value]
    for index, item in enumerate(rows):
        if isinstance(item, dict):
            place = document.place if len(rows) == 1 else f"{document.place}[{index}]"
            own = {name: one for name, one in _snake(item).items() if one is not None}
            yield _Row(place, about | own)


def _snake(value: JsonObject) -> JsonObject:
    return {
        _CAPITAL.sub(lambda found: f"_{found[0].lower()}", name): one for name, one in value.items()
    }


def _feedback(scores: Iterable[_Row], observations: dict[str, _Row]) -> CapturedScores:
    """Return the scores by what they judge. That of an agent's span or a tool's judges the trace,
    because only calls have rewards."""
    feedback = CapturedScores()
    for row in scores:
        score = number(row.value.get("value"))
        kind = row.value.get("data_type", "NUMERIC")
        if score is not None and kind in ("NUMERIC", "BOOLEAN"):
            names = ("observation_id", "trace_id", "session_id")
            owner = next((row.text(name) for name in names if row.value.get(name)), "")
            about = observations.get(owner)
            if about is not None and about.value.get("type") != "GENERATION":
                owner = about.text("trace_id")
            feedback.add(owner, score)
    return feedback


def _call(row: _Row, observations: dict[str, _Row]) -> CapturedCall:
    if row.value.get("level") == "ERROR":
        raise ImportFileError(f"{row.place}: the call failed (level ERROR)")
    # A call that was cut off has no end, but may have an output.
    start = moment(row.place, "start_time", row.value.get("start_time"))
    end = moment(row.place, "end_time", row.value.get("end_time") or row.text("start_time"))
    trace, session = row.text("trace_id"), row.text("session_id")
    return CapturedCall(
        place=row.place,
        call_id=row.text("id"),
        conversation=session or trace,
        agent=_agent(row, observations),
        start=start,
        end=end,
        call=llm_call(
            row.place,
            prompt_of(row.place, row.value.get("input")),
            reply_of(row.place, row.value.get("output")),
            _sampling(row),
            start,
            end,
        ),
        part_of=tuple(dict.fromkeys(filter(None, (trace, session)))),
    )


def _agent(row: _Row, observations: dict[str, _Row]) -> str | None:
    """Return the nearest enclosing observation of type AGENT, else the trace's name."""
    around: _Row | None = row
    seen: set[str] = set()
    while around is not None and around.text("id") not in seen:
        if around.value.get("type") == "AGENT":
            return around.text("name")
        seen.add(around.text("id"))
        around = observations.get(around.text("parent_observation_id"))
    return row.text("trace_name") or None


def _sampling(row: _Row) -> JsonObject:
    parameters, usage = (
        found if isinstance(found := decoded(row.value.get(name)), dict) else {}
        for name in ("model_parameters", "usage_details")
    )
    limit = parameters.get("max_completion_tokens") or parameters.get("max_tokens")
    return {
        "model": row.value.get("model") or row.value.get("provided_model_name"),
        "temperature": number(parameters.get("temperature")),
        "top_p": number(parameters.get("top_p")),
        "max_tokens": whole(number(limit)),
        "prompt_tokens": whole(number(usage.get("input"))),
        "completion_tokens": whole(number(usage.get("output"))),
    }

"""LangSmith runs as trajectories: one for each thread, or for each trace without a thread.

https://docs.langchain.com/langsmith/run-data-format. Read are runs as ``Client.list_runs`` gives
them, one a line or in ``runs``, with or without ``child_runs`` inside; in a bulk export inputs,
outputs and extra are JSON texts. A run of type ``llm`` is a call. Feedback becomes rewards.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

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
from babylon.formats.foreign_messages import decoded, prompt_of, record_of, reply_of
from babylon.formats.trace import Document, ImportFileError, LeaveOut, Trace, refuse

_THREAD = ("thread_id", "session_id", "conversation_id")  # as LangSmith groups its threads


@dataclass(frozen=True, slots=True)
class _Run:
    place: str
    value: JsonObject

    def text(self, name: str) -> str:
        return str(self.value.get(name) or "")

    @property
    def trace(self) -> str:
        return self.text("trace_id") or self.text("id")

    def object(self, *path: str) -> dict[str, Any]:
        """Return a nested object, empty if it is missing. Objects may be JSON texts."""
        found: object = self.value
        for name in path:
            found = decoded(found.get(name)) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


def is_langsmith(value: JsonObject) -> bool:
    """Return True for a run, or a page of runs."""
    runs = value.get("runs") or [value]
    first = runs[0] if isinstance(runs, list) and runs else None
    return isinstance(first, dict) and "run_type" in first


def read_langsmith(
    documents: Iterable[Document], agent_id: str, leave_out: LeaveOut = refuse
) -> Iterator[Trace]:
    """Yield the traces of an export. Calls that failed are left out.

    Raises:
        ImportFileError: a call cannot be read, unless ``leave_out`` goes on.
    """
    # A run may be listed, and stand inside its parent too.
    known = {run.text("id") or run.place: run for doc in documents for run in _runs(doc)}
    runs = [*known.values()]
    calls = [run for run in runs if run.value.get("run_type") == "llm"]
    roots = {run.trace: run for run in runs if not run.value.get("parent_run_id")}
    captured = []
    for run in calls:
        try:
            captured.append(_call(run, roots.get(run.trace)))
        except ImportFileError as error:
            leave_out(error)
    yield from captured_traces(_feedback(runs).given_to(captured), agent_id)


def _runs(document: Document) -> Iterator[_Run]:
    page = document.value.get("runs")
    waiting = (
        [(f"{document.place}[{index}]", one) for index, one in enumerate(page)]
        if isinstance(page, list)
        else [(document.place, document.value)]
    )
    for place, value in waiting:  # it grows meanwhile
        if not isinstance(value, dict):
            continue
        yield _Run(place, value)
        children = value.get("child_runs")
        if isinstance(children, list):
            waiting += [(f"{place}.child_runs[{n}]", one) for n, one in enumerate(children)]


def _feedback(runs: Iterable[_Run]) -> CapturedScores:
    """Return the means that people and evaluators gave. Those of a chain judge the whole trace."""
    feedback = CapturedScores()
    for run in runs:
        stats = run.object("feedback_stats").values()
        means = [number(one.get("avg")) for one in stats if isinstance(one, dict)]
        known = [mean for mean in means if mean is not None]
        if known:
            owner = run.text("id") if run.value.get("run_type") == "llm" else f"trace {run.trace}"
            feedback.add(owner, fmean(known))
    return feedback


def _call(run: _Run, root: _Run | None) -> CapturedCall:
    if run.value.get("error") or run.value.get("status") == "error":
        raise ImportFileError(f"{run.place}: the call failed (status error)")
    # A thread goes on over several traces, so it names the trajectory if there is one.
    start = moment(run.place, "start_time", run.value.get("start_time"))
    end = moment(run.place, "end_time", run.value.get("end_time") or run.text("start_time"))
    metadata = run.object("extra", "metadata")
    thread = next((str(metadata[name]) for name in _THREAD if metadata.get(name)), "")
    return CapturedCall(
        place=run.place,
        call_id=run.text("id"),
        conversation=thread or run.trace,
        agent=root.text("name") if root is not None and root is not run else None,
        start=start,
        end=end,
        call=llm_call(
            run.place,
            prompt_of(run.place, run.value.get("inputs")),
            reply_of(run.place, record_of(run.value.get("outputs"))),  # a bulk export has texts
            _sampling(run, metadata),
            start,
            end,
        ),
        part_of=(f"trace {run.trace}",),
    )


def _sampling(run: _Run, metadata: JsonObject) -> JsonObject:
    asked = {**run.object("inputs"), **run.object("extra", "invocation_params")}
    usage = metadata.get("usage_metadata") or run.object("outputs", "usage_metadata")
    used = usage if isinstance(usage, dict) else {}
    limits = (asked.get("max_completion_tokens"), asked.get("max_tokens"))
    models = (metadata.get("ls_model_name"), asked.get("model"), asked.get("model_name"))
    return {
        "model": next(filter(None, models), None),
        "temperature": _first(asked.get("temperature"), metadata.get("ls_temperature")),
        "top_p": _first(asked.get("top_p")),
        "max_tokens": whole(_first(*limits, metadata.get("ls_max_tokens"))),
        "prompt_tokens": whole(_first(run.value.get("prompt_tokens"), used.get("input_tokens"))),
        "completion_tokens": whole(
            _first(run.value.get("completion_tokens"), used.get("output_tokens"))
        ),
    }


def _first(*values: object) -> float | None:
    return next((one for one in map(number, values) if one is not None), None)

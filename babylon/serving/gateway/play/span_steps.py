"""The steps of a trajectory from its spans and its recorded calls."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import AwareDatetime

from babylon.serving.gateway.play.assemble import RESPONSE, TimedStep
from babylon.serving.gateway.play.events import ElsewhereCall, Id, PlayModel, StepAction, StepEvent
from babylon.serving.gateway.recording_rules import UNRECORDED
from babylon.store.plays import PlayedCall


class PlaySpan(PlayModel):
    """The content of a span: a call of a model, the execution of a tool, or only the agent.

    ``call_id`` may be that of a recorded call; ``call`` is what the span itself holds of the call.
    """

    at: AwareDatetime
    agent_id: Id | None = None
    call_id: Id | None = None
    call: ElsewhereCall | None = None
    action: StepAction | None = None


def first_agent(spans: Iterable[PlaySpan]) -> str | None:
    """Return the agent of the outermost span, which begins first."""
    return next(
        (one.agent_id for one in sorted(spans, key=lambda one: one.at) if one.agent_id), None
    )


def span_steps(
    trajectory_id: str, spans: Sequence[PlaySpan], records: Sequence[PlayedCall]
) -> list[TimedStep]:
    """Return the steps in the order of time: each call is one, with the tool that it led to.

    A second tool of the same call is a step of its own. A recorded call counts once, however many
    spans tell of it, and takes the place of what they hold. So does the id of a call that a rule
    kept out of the records. A span's call of which the gateway knows nothing is a call elsewhere.
    """
    recorded = {one.call_id: one.started_at for one in records}
    told: set[str] = set()
    found: list[tuple[datetime, str | ElsewhereCall | StepAction]] = []
    for span in sorted(spans, key=lambda one: one.at):
        name = span.call_id
        if name and (name in recorded or name.startswith(UNRECORDED)):
            # By the agent's clock, which its tools have too, and not by the gateway's.
            if name not in told:
                told.add(name)
                found.append((span.at, name))
        elif known := span.call or span.action:
            found.append((span.at, known))
    found += [(at, call_id) for call_id, at in recorded.items() if call_id not in told]
    steps: list[TimedStep] = []
    for at, one in sorted(found, key=lambda item: item[0]):
        last = steps[-1][1] if steps else None
        if isinstance(one, StepAction) and last and last.calls and last.action == RESPONSE:
            steps[-1] = (steps[-1][0], last.model_copy(update={"action": one}))
            continue
        step = StepEvent(
            type="step",
            trajectory_id=trajectory_id,
            number=len(steps),
            calls=[] if isinstance(one, StepAction) else [one],
            action=one if isinstance(one, StepAction) else RESPONSE,
        )
        steps.append((at, step))
    return steps

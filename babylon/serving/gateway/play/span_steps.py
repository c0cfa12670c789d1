"""The steps of a trajectory from its spans and its recorded calls."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import AwareDatetime

from babylon.serving.gateway.play.assemble import RESPONSE, TimedStep
from babylon.serving.gateway.play.events import ElsewhereCall, Id, PlayModel, StepAction, StepEvent
from babylon.store.plays import PlayedCall


class PlaySpan(PlayModel):
    """What a span tells: a call of a model, the execution of a tool, or only who plays.

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
    spans tell of it, and takes the place of what they hold. A span's call that is not recorded is
    a call elsewhere.
    """
    untold = {one.call_id: one.started_at for one in records}
    recorded = {*untold}
    found: list[tuple[datetime, str | ElsewhereCall | StepAction]] = []
    for span in sorted(spans, key=lambda one: one.at):
        if span.call_id in recorded:
            # By the agent's clock, which its tools have too, and not by the gateway's.
            if untold.pop(span.call_id, None):
                found.append((span.at, span.call_id))
        elif told := span.call or span.action:
            found.append((span.at, told))
    found += [(at, call_id) for call_id, at in untold.items()]
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

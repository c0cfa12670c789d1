"""Points at which workers are killed: every failpoint, with the number of the visit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STAGES = ("collected", "validated", "thinned", "scored")  # one artifact each
STATES = ("validated", "scored", "deployed")  # the other moves have places of their own
FLOW = (
    *("claim.before", "claim.after", "lease.before", "lease.after"),
    *("collect.before", "collect.reading", "collected.before", "collected.after"),
    *("rejections.before", "rejections.after"),
    *("health.before", "health.after"),
    *("judgment.before", "judgment.after", "scores.before", "scores.after"),
    *("write_back.before", "write_back.after", "line.before", "line.after"),
    *("progress.before", "progress.written", "progress.after"),
    *("checkpoint.before", "checkpoint.written", "checkpoint.after"),
    *("progress.forget", "progress.forgotten"),
    *("policy.before", "policy.inserted", "policy.after", "verdict.before", "verdict.after"),
    *("proposal.opened", "route.before", "route.inserted", "route.after"),
    *("proposal.closed", "route.acknowledged"),
    *("retire.before", "retire.marked", "retire.deleting", "retire.deleted"),
)
QUICK = {
    "artifact.opened@4",
    "judgment.before",
    "progress.after,progress.taken_up",
    "checkpoint.written",
    "policy.inserted",
    "policy.after",
    "route.after",
    "route.after+ab",
    "state.before@3",
    "retire.marked",
}


@dataclass(frozen=True, slots=True)
class Case:
    """``crashes``: what each run but the last is told (``BABYLON_FAILPOINT``)."""

    crashes: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        strategy = self.settings.get("deployment", {}).get("strategy")
        return "+".join([",".join(self.crashes), *([strategy] if strategy else [])])

    @property
    def leads_elsewhere(self) -> dict[str, Any]:
        """Settings under which an uninterrupted window ends otherwise."""
        deployment = self.settings.get("deployment")
        return {"deployment": deployment} if deployment else {}


RECORDED = (
    *(Case((f"recorder.{moment}",)) for moment in ("before", "inserted", "after")),
    *(Case((f"outcomes.{moment}",)) for moment in ("before", "inserted", "after")),
    *(Case((f"base.{moment}",)) for moment in ("before", "after")),
)
"""Writes beside the flow: the game's rows, and the first policy."""


def cases() -> Iterator[Case]:
    """The flow's own."""
    for place in FLOW:
        yield Case((place,))
    for moment in ("opened", "written", "published"):
        for visit, _ in enumerate(STAGES, start=1):
            yield Case((f"artifact.{moment}@{visit}",))
    for moment in ("before", "after"):
        yield Case((f"judgment.{moment}@2",))
        for visit, _ in enumerate(STATES, start=1):
            yield Case((f"state.{moment}@{visit}",))
        yield Case((f"collect.before=raise,state.{moment}",))  # failed
        yield Case((f"verdict.before=raise,release.{moment}",))  # trained, and free again
        yield Case((f"tracking.{moment}",), {"tracking": {"project": "crashes"}})
    for moment in ("opened", "closed"):
        yield Case((f"proposal.{moment}",), {"deployment": {"strategy": "canary"}})
    for moment in ("inserted", "after", "acknowledged"):
        yield Case((f"route.{moment}",), {"deployment": {"strategy": "ab"}})
    for moment in ("take_up", "taken_up"):
        yield Case(("progress.after", f"progress.{moment}"))

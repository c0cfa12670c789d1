"""Failpoints: named places, before and after every side effect, where a test stops this process.

``BABYLON_FAILPOINT=policy.before`` kills the process at that place, as a power cut would: nothing
is flushed or closed. ``artifact.written@3`` kills it at the third visit,
``checkpoint.written=stop`` halts it until it receives SIGCONT, and ``verdict.before=raise`` raises
an error. Commas separate several failpoints. While the variable is unset, a failpoint costs one
look-up. ``tests/faults`` visits all of them.
"""

import os
import re
import signal
import threading
from collections import Counter
from functools import cache
from typing import Literal, cast, get_args

from babylon.core.errors import BabylonError, ConfigError

VARIABLE = "BABYLON_FAILPOINT"
Action = Literal["kill", "stop", "raise"]
Name = Literal[
    # a window's row
    "claim.before", "claim.after", "lease.before", "lease.after", "state.before", "state.after",
    "release.before", "release.after", "line.before", "line.after",
    # collect, validate, dropout, score, publish: each writes one artifact
    "collect.before", "collect.reading", "artifact.opened", "artifact.written",
    "artifact.published", "collected.before", "collected.after", "rejections.before",
    "rejections.after", "health.before", "health.after", "judgment.before", "judgment.after",
    "scores.before", "scores.after", "write_back.before", "write_back.after",
    # train
    "base.before", "base.after", "progress.take_up", "progress.taken_up", "progress.before",
    "progress.written", "progress.after", "checkpoint.before", "checkpoint.written",
    "checkpoint.after", "progress.forget", "progress.forgotten", "policy.before",
    "policy.inserted", "policy.after",
    # validate checkpoint, deploy, and what follows the window
    "verdict.before", "verdict.after", "proposal.opened", "proposal.closed", "route.before",
    "route.inserted", "route.after", "route.acknowledged", "tracking.before", "tracking.after",
    "retire.before", "retire.marked", "retire.deleting", "retire.deleted",
    # what agents write
    "recorder.before", "recorder.inserted", "recorder.after", "outcomes.before",
    "outcomes.inserted", "outcomes.after",
]  # fmt: skip
NAMES: tuple[Name, ...] = get_args(Name)

_PART = re.compile(r"(?P<name>[a-z_.]+)(@(?P<visit>\d+))?(=(?P<action>kill|stop|raise))?")
_reached: Counter[str] = Counter()


class FailpointError(BabylonError):
    """Raised by a failpoint whose action is ``raise``."""


def failpoint(name: Name) -> None:
    """Kill or halt the process, or raise an error, if ``BABYLON_FAILPOINT`` names this place."""
    if not (armed := _armed()):
        return
    _reached[name] += 1
    match armed.get((name, _reached[name])):
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":  # sent to the process, the signal could reach another thread first
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "raise":
            raise FailpointError(f"failpoint {name} was reached: {VARIABLE} asks for an error here")


def parse(text: str) -> dict[tuple[str, int], Action]:
    """Parse ``artifact.written@2=stop,policy.before`` into (name, visit) → action.

    Raises:
        ConfigError: a failpoint or action is unknown.
    """
    armed: dict[tuple[str, int], Action] = {}
    for part in filter(None, text.split(",")):
        read = _PART.fullmatch(part)
        if read is None or read["name"] not in NAMES:
            raise ConfigError(
                f"{VARIABLE}={part!r}: a failpoint is NAME[@VISIT][=kill|stop|raise], NAME one of"
                f" {', '.join(NAMES)}"
            )
        armed[read["name"], int(read["visit"] or 1)] = cast(Action, read["action"] or "kill")
    return armed


@cache
def _armed() -> dict[tuple[str, int], Action]:
    return parse(os.environ.get(VARIABLE, ""))

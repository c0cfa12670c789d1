"""What a scorer is: all trajectories of a window in, one number for each out.

A scorer is a plain or ``async`` callable. It gets every trajectory of one window at once, in a
fixed order, and returns one finite score each, in that order: higher is better. Only differences
inside a group (window, scenario) matter to the trainer. Use a scale of about 0 to 1: a group whose
scores have a standard deviation below a thousandth counts as equal and teaches nothing. Money is
in US dollars (``pnl_usd``), rates are shares from 0 to 1. A scorer that cannot judge raises: a
failure is never a low score.

    def profit(trajectories: Sequence[Trajectory]) -> list[float]:
        return [trajectory.pnl_usd for trajectory in trajectories]

A scorer with a parameter named ``context`` gets a ``ScoringContext`` by that name: settings, the
database, and the window's artifact, from which ``babylon.scoring.judge.evidence`` reads the
recorded steps and the ground truth.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from babylon.core.errors import BabylonError, ScoringError
from babylon.core.settings import Settings
from babylon.core.trajectories import Trajectory
from babylon.core.types import Artifact

if TYPE_CHECKING:
    from babylon.store import Store


@dataclass(frozen=True, slots=True)
class Score:
    """A score and, where the scorer tells, the parts that it was made of, the ends of an interval,
    reasons, and the text that it was judged by."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    reasons: tuple[str, ...] = ()
    seen: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringContext:
    """What a scorer may need beside the trajectories.

    ``metrics`` is the scorer's to fill; the window's metrics show each as ``judge_<name>``.
    """

    window_id: str
    settings: Settings
    store: "Store"
    artifact: Artifact
    metrics: dict[str, float | int | str] = field(default_factory=dict)


Scores: TypeAlias = Sequence[float] | Sequence[Score]
Scorer: TypeAlias = Callable[..., Scores | Awaitable[Scores]]


async def score(
    name: str,
    scorer: Scorer,
    trajectories: Sequence[Trajectory],
    context: ScoringContext | None = None,
) -> list[Score]:
    """Run a scorer, plain ones in a thread, and check what it returns.

    Raises:
        ScoringError: it raised, or did not return one finite number a trajectory.
    """
    try:
        more = {"context": context} if _wants_context(scorer) else {}
        returned: Any = await asyncio.to_thread(scorer, trajectories, **more)
        if inspect.isawaitable(returned):
            returned = await returned
    except BabylonError:
        raise
    except (Exception, SystemExit) as error:  # other people's code: whatever it raises is a failure
        raise ScoringError(
            f"scorer {name} raised {error!r} on {_which(trajectories)}: nothing was scored"
        ) from error
    if not isinstance(returned, Sequence) or len(returned) != len(trajectories):
        got = f"{len(returned)}" if isinstance(returned, Sequence) else f"{returned!r}"
        raise ScoringError(
            f"scorer {name} returned {got} for {len(trajectories)} trajectories:"
            " return a list with one score each"
        )
    return [
        _checked(name, value, trajectory)
        for value, trajectory in zip(returned, trajectories, strict=True)
    ]


def _checked(name: str, value: Any, trajectory: Trajectory) -> Score:
    given = value if isinstance(value, Score) else Score(value)
    try:
        number = float(given.value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ScoringError(
            f"scorer {name} returned {given.value!r} for trajectory {trajectory.trajectory_id}:"
            " scores must be finite numbers"
        )
    return replace(given, value=number)


def _wants_context(scorer: Scorer) -> bool:
    try:
        return "context" in inspect.signature(scorer).parameters
    except ValueError:  # some built-in callables have none to show
        return False


def _which(trajectories: Sequence[Trajectory]) -> str:
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    shown = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
    return f"{len(ids)} trajectories ({shown})"

"""The protocol of scorers: all trajectories of a window in, one score for each out.

A scorer is a plain or ``async`` callable. It gets all trajectories of one window at once, in a
fixed order, and returns one finite score for each, in that order. Higher is better. The trainer
uses only differences inside a group (scenario). Scores should lie between about 0 and 1: a group
whose scores have a standard deviation below 0.001 counts as equal and is not trained on. A scorer
that cannot judge raises an error. A failure is never a low score. A scorer that cannot judge one
trajectory returns a ``Rejection`` in place of its score: the trajectory is not trained on, and
appears among the rejected ones of the window.

    def profit(trajectories: Sequence[Trajectory]) -> list[float]:
        return [trajectory.pnl_usd for trajectory in trajectories]

A scorer with a parameter named ``context`` gets a ``ScoringContext``: the settings, the database
and the window's artifact. ``babylon.scoring.judge.evidence`` reads the recorded steps and the
ground truth from that artifact.
"""

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, TypeAlias

import msgspec

from babylon.core.errors import BabylonError, ConfigError, ScoringError, reason_of
from babylon.core.settings import JudgeSettings, Settings
from babylon.core.trajectories import Trajectory
from babylon.core.types import Artifact, Rejection
from babylon.scoring.judge.judge_requirements import require_art_judge, require_judge
from babylon.store import Store

FALLBACK = "scored by the heuristic: "  # begins the reason of a score that the judge should give


@dataclass(frozen=True, slots=True)
class Score:
    """A score with optional details: its parts, its interval, and the judge's reasons and text.

    ``rewards``: step → the part of the score that its decision earned (``CREDIT=decision``). The
    part that belongs to no step is the score less their sum.
    """

    value: float
    components: dict[str, float] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    reasons: tuple[str, ...] = ()
    seen: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringContext:
    """Data for scorers that need more than the trajectories.

    A scorer may fill ``metrics``. The window's metrics show each entry as ``judge_<name>``.
    """

    window_id: str
    settings: Settings
    store: Store
    artifact: Artifact
    metrics: dict[str, float | int | str] = field(default_factory=dict)


ScoreOrRejection: TypeAlias = Score | Rejection
"""The score of a trajectory, or the reason why it has none."""
Scores: TypeAlias = Sequence[float] | Sequence[Score] | Sequence[ScoreOrRejection]
Scorer: TypeAlias = Callable[..., Scores | Awaitable[Scores]]


async def score(
    name: str,
    scorer: Scorer,
    trajectories: Sequence[Trajectory],
    context: ScoringContext | None = None,
) -> list[ScoreOrRejection]:
    """Run a scorer and check its scores. A plain scorer runs in a thread.

    The error of a scorer that raised shows neither its message nor its cause, because both may
    quote a prompt or the ground truth.

    Raises:
        ScoringError: the scorer raised, or did not return one finite number for each trajectory.
    """
    failure: ScoringError | None = None
    try:
        more = {"context": context} if _wants_context(scorer) else {}
        returned: object = await asyncio.to_thread(scorer, trajectories, **more)
        if inspect.isawaitable(returned):
            returned = await returned
    except BabylonError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        failure = ScoringError(
            f"scorer {name} raised {reason_of(error)} on {_ids(trajectories)}: nothing was scored"
        )
    if failure is not None:  # outside of ``except``, so that no cause is shown
        raise failure
    if not isinstance(returned, Sequence) or len(returned) != len(trajectories):
        got = f"{len(returned)}" if isinstance(returned, Sequence) else type(returned).__name__
        raise ScoringError(
            f"scorer {name} returned {got} for {len(trajectories)} trajectories:"
            " return a list with one score each"
        )
    return [
        _checked(name, value, trajectory)
        for value, trajectory in zip(returned, trajectories, strict=True)
    ]


def rewards_json(
    trajectories: Sequence[Trajectory], scores: Sequence[ScoreOrRejection]
) -> dict[str, str]:
    """Return trajectory id → the rewards of its steps, for the scored artifact."""
    return {
        trajectory.trajectory_id: msgspec.json.encode(given.rewards).decode()
        for trajectory, given in zip(trajectories, scores, strict=True)
        if isinstance(given, Score)
    }


def _checked(name: str, value: Any, trajectory: Trajectory) -> ScoreOrRejection:
    of = f"trajectory {trajectory.trajectory_id}"
    if isinstance(value, Rejection):
        return replace(value, trajectory_id=trajectory.trajectory_id)
    given = value if isinstance(value, Score) else Score(value)
    number = _number(given.value)
    if not math.isfinite(number):
        got = repr(number) if isinstance(given.value, float) else type(given.value).__name__
        raise ScoringError(f"scorer {name} returned {got} for {of}: scores must be finite numbers")
    try:
        rewards = {index(step): _number(reward) for step, reward in given.rewards.items()}
    except TypeError:
        rewards = {0: math.nan}
    if not all(map(math.isfinite, rewards.values())):
        raise ScoringError(
            f"scorer {name} returned a reward that is not finite for a step of {of}: rewards must"
            " be finite numbers by number of the step"
        )
    parts = {part: _number(one) for part, one in given.components.items()}
    ends = [_number(end) for end in (given.low, given.high) if end is not None]
    if not all(map(math.isfinite, [*parts.values(), *ends])):
        raise ScoringError(
            f"scorer {name} returned a component or an interval that is not finite for {of}:"
            " leave out what is not known"
        )
    return replace(given, value=number, rewards=rewards, components=parts)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _wants_context(scorer: Scorer) -> bool:
    try:
        return "context" in inspect.signature(scorer).parameters
    except ValueError:  # some built-in callables have no signature
        return False


def _ids(trajectories: Sequence[Trajectory]) -> str:
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    shown = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
    return f"{len(ids)} trajectories ({shown})"


SCORERS = {
    "heuristic": "babylon.scoring.rewards.heuristic:heuristic",
    "ruler": "babylon.scoring.judge.judge_scorers:ruler",
    "art-ruler": "babylon.scoring.rewards.art_ruler:art_ruler",
    "feedback": "babylon.scoring.feedback:feedback",
}
"""Name → function. The module is imported when the scorer is chosen."""

NEEDS_JUDGE = ("ruler",)


def load_scorer(name: str) -> Scorer:
    """Return the scorer of that name.

    Raises:
        ConfigError: the name is unknown, or the module does not import.
    """
    module_name, colon, attribute = SCORERS.get(name, name).partition(":")
    if not (colon and module_name and attribute) or module_name.startswith("."):
        raise ConfigError(
            f"scorer {name!r} is unknown: choose {', '.join(SCORERS)}"
            " or your own function, package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"scorer {name!r}: module {module_name!r} does not import ({error}):"
            " install it or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"scorer {name!r}: module {module_name!r} does not import ({error!r}): correct it"
        ) from error
    scorer = getattr(module, attribute, None)
    if not callable(scorer):
        raise ConfigError(
            f"scorer {name!r}: {module.__name__} ({module.__file__}) has no function {attribute!r}"
        )
    found: Scorer = scorer
    return found


def reads_all_settings(name: str) -> bool:
    """Return true for a user's scorer with a context, which may read any setting."""
    return name not in SCORERS and _wants_context(load_scorer(name))


def require_scorer(scorer: str, judge: JudgeSettings) -> None:
    """Check the chosen scorer before a window is claimed.

    Raises:
        ConfigError: the scorer is unknown, or a setting that it needs is missing.
    """
    load_scorer(scorer)
    if scorer in NEEDS_JUDGE:
        require_judge(scorer, judge)
    elif scorer == "art-ruler":
        require_art_judge(judge)

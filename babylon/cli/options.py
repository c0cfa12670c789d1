"""Options of the commands; several commands share some of them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from babylon.core.errors import ConfigError
from babylon.core.learning_settings import Loss as LossName
from babylon.core.learning_settings import Trainer as TrainerName
from babylon.core.settings import MAX_HOURS
from babylon.core.windows import start_of


class Mode(StrEnum):
    """Modes of ``babylon train``."""

    SINGLE = "single"
    CONTINUOUS = "continuous"
    BACKFILL = "backfill"


class Preset(StrEnum):
    """Rules of the game, by the names in ``babylon.game.market.scenario.PRESETS``."""

    STARTER = "starter"
    HOUR = "hour"


GameRules = Annotated[
    Preset, typer.Option(help="starter: the demo's small game; hour: perps, feed, a full hour.")
]
Shared = Annotated[bool, typer.Option("--shared", help="Agents of a scenario trade in one market.")]
MAX_INTEGER = 2**31 - 1  # the largest number of a column of Postgres' type integer
Version = Annotated[
    int, typer.Argument(min=0, max=MAX_INTEGER, metavar="VERSION", help="Policy version.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
MinAgents = Annotated[
    int | None, typer.Option(min=2, help="Agents that a window needs.", metavar="N")
]
MinActions = Annotated[
    int | None, typer.Option(min=1, help="Steps that a trajectory needs.", metavar="N")
]
WindowMinutes = Annotated[int | None, typer.Option(help="Length of a window.", metavar="M")]

TrainMode = Annotated[
    Mode, typer.Option(help="One window, each window as it closes, or a range of past windows.")
]
WindowId = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="YYYY-MM-DDTHH:MM in UTC; default: a half-finished one, else the newest ready one.",
    ),
]
Frequency = Annotated[
    int | None, typer.Option(metavar="N", help="Continuous: train every N windows.")
]
BackfillHours = Annotated[
    int | None, typer.Option(min=1, max=MAX_HOURS, metavar="H", help="Backfill: the last H hours.")
]
First = Annotated[
    str | None,
    typer.Option("--from", metavar="WHEN", help="Backfill: first window, a date or an id."),
]
Last = Annotated[
    str | None, typer.Option("--to", metavar="WHEN", help="Backfill: last window, inclusive.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Backfill: at most N windows, the oldest.")
]
Recipe = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Train what was never trained in windows that are done."),
]
IncludeLate = Annotated[
    bool | None, typer.Option("--include-late", help="With --recipe: late trajectories too.")
]
Iterations = Annotated[int | None, typer.Option(min=1, metavar="N", help="Passes over the window.")]
Processes = Annotated[
    int | None,
    typer.Option("--nproc", min=0, metavar="N", help="Processes of an update; 0: one a GPU."),
]
Population = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of updates of each window, each with settings of its own."
    ),
]
EvolveEvery = Annotated[
    int | None, typer.Option(min=1, metavar="K", help="Windows after which these settings evolve.")
]
TargetTrajectories = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Thin larger windows to about N.")
]
MaxDropout = Annotated[
    float | None, typer.Option(metavar="F", help="Largest share that thinning may take.")
]
LookbackHours = Annotated[
    int | None, typer.Option(min=1, max=MAX_HOURS, metavar="H", help="How old a window may be.")
]
RewardThreshold = Annotated[
    float | None, typer.Option(metavar="R", help="Reject trajectories that earned less.")
]
Scorer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="heuristic, feedback, ruler, art-ruler or package.module:function.",
    ),
]
Trainer = Annotated[
    TrainerName | None, typer.Option(help="The trainer that computes the update; default torch.")
]
Loss = Annotated[LossName | None, typer.Option(help="The loss; default ppo_clip.")]


def well_formed_id(window: str | None) -> str | None:
    """Refuse a text that is not a window id, before a command reports it as an unknown window."""
    if window is not None:
        start_of(window)
    return window


NamedWindow = Annotated[
    str, typer.Argument(metavar="ID", help="See `babylon windows list`.", callback=well_formed_id)
]


def _written(reason: str) -> str:
    if not reason.strip():
        raise typer.BadParameter("it is empty: others will read it")
    return reason


NeededReason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", callback=_written, help="Shown to others.")
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given, as overrides of settings by group."""
    overrides: dict[str, Any] = {}
    for name, value in options.items():
        kept = given(**value) if isinstance(value, dict) else value
        if kept is not None and kept != {}:
            overrides[name] = kept
    return overrides


def require_new_directory(target: Path) -> None:
    """Refuse a target that exists or cannot be made, before the work that would fill it.

    Its parents are made.

    Raises:
        ConfigError: it exists.
        OSError: it cannot be made.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: name a new directory")
    target.mkdir(parents=True)
    target.rmdir()

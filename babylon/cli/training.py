"""``babylon train`` and ``babylon demo``: both hand over to the flows.

The library does not import Prefect, so these commands check their options and then replace this
process by ``python -m babylon.flows`` with one JSON request (``babylon.cli.requests``).
"""

import os
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import babylon
from babylon.cli.options import Json, MinActions, MinAgents, WindowMinutes, given
from babylon.cli.requests import DemoRequest, Request, TrainRequest, encode
from babylon.core.home import make_directory
from babylon.core.settings import MAX_HOURS, Loss, Trainer, load_settings
from babylon.core.windows import Clock, check_settled, parse_bound, parse_window_id

app = typer.Typer()


class Mode(StrEnum):
    SINGLE = "single"
    CONTINUOUS = "continuous"
    BACKFILL = "backfill"


@app.command()
def train(
    mode: Annotated[Mode, typer.Option(help="One window, each one as it closes, or all past.")] = (
        Mode.SINGLE
    ),
    window: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="YYYY-MM-DDTHH:MM in UTC; default: one half-finished, else the newest that waits.",
        ),
    ] = None,
    window_minutes: WindowMinutes = None,
    frequency: Annotated[
        int | None, typer.Option(metavar="N", help="Continuous: train every N windows.")
    ] = None,
    backfill_hours: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_HOURS, metavar="H", help="Backfill: the last H hours."),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option("--from", metavar="WHEN", help="Backfill: first window, a date or an id."),
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="WHEN", help="Backfill: last window, inclusive.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Backfill: at most N windows, the oldest."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Take up windows that are done, for what was never trained in them.",
        ),
    ] = None,
    include_late: Annotated[
        bool, typer.Option("--include-late", help="With --recipe: late trajectories too.")
    ] = False,
    min_agents: MinAgents = None,
    min_actions: MinActions = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Passes over the window.")
    ] = None,
    target_trajectories: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Thin larger windows to about N.")
    ] = None,
    max_dropout: Annotated[
        float | None, typer.Option(metavar="F", help="Largest share that thinning may take.")
    ] = None,
    lookback_hours: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_HOURS, metavar="H", help="How old a window may be."),
    ] = None,
    reward_threshold: Annotated[
        float | None, typer.Option(metavar="R", help="Reject trajectories that earned less.")
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="heuristic, ruler, preference, regression, art-ruler or package.module:function.",
        ),
    ] = None,
    trainer: Annotated[
        Trainer | None, typer.Option(help="Who computes the update: torch by default.")
    ] = None,
    loss: Annotated[Loss | None, typer.Option(help="What is minimised: ppo_clip by default.")] = (
        None
    ),
    json: Json = False,
) -> None:
    """Train on recorded play: one window, every window as it closes, or a backlog."""
    if window and mode is not Mode.SINGLE:
        raise typer.BadParameter(f"--window names one window: not with --mode {mode}")
    if backfill_hours and mode is not Mode.BACKFILL:
        raise typer.BadParameter(f"--backfill-hours is for --mode backfill, not {mode}")
    if (first or last or limit) and mode is not Mode.BACKFILL:
        raise typer.BadParameter(f"--from, --to and --limit are for --mode backfill, not {mode}")
    if backfill_hours and first:
        raise typer.BadParameter("--backfill-hours and --from both say where to begin: give one")
    if frequency and mode is not Mode.CONTINUOUS:
        raise typer.BadParameter(f"--frequency is for --mode continuous, not {mode}")
    if recipe and mode is Mode.CONTINUOUS:
        raise typer.BadParameter("--recipe takes up past windows: not with --mode continuous")
    if include_late and not recipe and "+" not in (window or ""):
        raise typer.BadParameter("--include-late trains nothing by itself: name a --recipe")
    overrides = _checked(
        windows={
            "minutes": window_minutes,
            "frequency": frequency,
            "recipe": recipe,
            "include_late": include_late or None,
            "min_agents": min_agents,
            "lookback_hours": lookback_hours,
        },
        quality={
            "min_actions": min_actions,
            "target_trajectories": target_trajectories,
            "max_dropout": max_dropout,
            "reward_threshold": reward_threshold,
        },
        training={"iterations": iterations, "trainer": trainer, "loss": loss},
        scoring={"scorer": scorer},
    )
    from babylon.scoring.scorer import require_scorer
    from babylon.training.backends.trainer_requirements import require_trainer

    # The flow refuses these too, but only after Prefect has started.
    settings = load_settings(**overrides)
    if window is not None:
        tomorrow = datetime.now(UTC) + timedelta(days=1)  # only the database's clock is right
        check_settled(parse_window_id(window, settings.windows.minutes), Clock(now=tomorrow), 0.0)
    for bound in filter(None, (first, last)):
        parse_bound(bound)
    require_scorer(settings.scoring.scorer, settings.judge)
    require_trainer(settings.training, settings.model)
    _become_flow(
        TrainRequest(
            mode=mode.value,
            window_id=window,
            hours=backfill_hours,
            first=first,
            last=last,
            limit=limit,
            overrides=overrides,
            json=json,
        )
    )


@app.command()
def demo(
    windows: Annotated[int, typer.Option(min=1, metavar="N", help="Hours of play.")] = 12,
    seed: Annotated[int | None, typer.Option(help="Seed of market, model and training.")] = None,
    json: Json = False,
) -> None:
    """A fleet plays simulated hours; each is trained, validated and deployed."""
    _become_flow(DemoRequest(windows=windows, overrides=_checked(seed=seed), json=json))


def _checked(**options: Any) -> dict[str, Any]:
    """The options that were given, checked before any heavy import."""
    overrides = given(**options)
    load_settings(**overrides)
    return overrides


def _become_flow(request: Request) -> NoReturn:
    """Replace this process; the flows beside this very package are the ones that run."""
    # Prefect's directory too: Prefect itself makes it where nobody tells an error in one line.
    make_directory(load_settings(**request.overrides).home.root / "prefect")
    root = str(Path(babylon.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # What goes wrong is told in one line at the end: tracebacks and bars of others would bury it.
    quiet = {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TQDM_DISABLE": "1",
    }
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "babylon.flows", encode(request)],
        quiet | dict(os.environ) | {"PYTHONPATH": path},
    )

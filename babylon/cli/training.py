"""``babylon train`` and ``babylon demo``: check the options, then run the flows."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from babylon.cli import options as o
from babylon.cli.flow_runs import prefect_ready, stop_signals
from babylon.cli.options import Mode, given
from babylon.cli.output import print_json, with_store
from babylon.cli.training_report import print_training, training_report
from babylon.core.settings import Settings, WindowSettings
from babylon.core.settings_loading import load_settings
from babylon.core.types import WindowResult
from babylon.core.windows import Clock, check_settled, parse_bound, parse_window_id

app = typer.Typer()
OVERRIDES = {
    "windows": ("frequency", "recipe", "include_late", "min_agents", "lookback_hours"),
    "quality": ("min_actions", "target_trajectories", "max_dropout", "reward_threshold"),
    "scoring": ("scorer",),
    "training": ("iterations", "processes", "trainer", "loss"),
}
"""Options of ``train`` that are settings of the same name, by group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """The windows to train, and the settings by group that hold for them."""

    mode: Mode
    window: str | None
    hours: int | None
    first: str | None
    last: str | None
    limit: int | None
    overrides: dict[str, Any]


@app.command()
def train(
    mode: o.TrainMode = Mode.SINGLE,
    window: o.WindowId = None,
    window_minutes: o.WindowMinutes = None,
    frequency: o.Frequency = None,
    backfill_hours: o.BackfillHours = None,
    first: o.First = None,
    last: o.Last = None,
    limit: o.Limit = None,
    recipe: o.Recipe = None,
    include_late: o.IncludeLate = None,
    min_agents: o.MinAgents = None,
    min_actions: o.MinActions = None,
    iterations: o.Iterations = None,
    processes: o.Processes = None,
    target_trajectories: o.TargetTrajectories = None,
    max_dropout: o.MaxDropout = None,
    lookback_hours: o.LookbackHours = None,
    reward_threshold: o.RewardThreshold = None,
    scorer: o.Scorer = None,
    trainer: o.Trainer = None,
    loss: o.Loss = None,
    population: o.Population = None,
    evolve_every: o.EvolveEvery = None,
    json: o.Json = False,
) -> None:
    """Train on recorded play: one window, every window as it closes, or a range of past windows."""
    options = locals()  # each option by its name, so that OVERRIDES can sort them into groups
    overrides = {group: {name: options[name] for name in OVERRIDES[group]} for group in OVERRIDES}
    overrides["windows"]["minutes"] = window_minutes
    overrides["population"] = {"size": population, "evolve_every": evolve_every}
    request = TrainRequest(
        mode=mode,
        window=window,
        hours=backfill_hours,
        first=first,
        last=last,
        limit=limit,
        overrides=given(**overrides),
    )
    _check_usage(request)
    settings = _load_checked(request)
    with prefect_ready(settings.home, settings.prefect, json=json):
        results = _run(request)
    report = training_report(mode, results, _searched(request, settings.windows))
    print_json(report) if json else print_training(report, results, settings.home)
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def demo(
    windows: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Windows. Default: 7; 3 of the hour; 4 live."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of market, model and training.")] = None,
    rules: o.GameRules = o.Preset.STARTER,
    shared: o.Shared = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Rehearse: real time, windows of 15 minutes (hour: 60), services of `up`.",
        ),
    ] = False,
    json: o.Json = False,
) -> None:
    """A fleet plays simulated hours; each is trained, validated and deployed."""
    from babylon.cli.demo import print_demo, rehearse, run
    from babylon.ops.demo import report_json

    settings = load_settings(**given(seed=seed))
    asked = (settings.home, settings.seed, settings.model.base, rules.value, windows, shared)
    if live:  # with the Prefect server of its own services
        report = rehearse(*asked)
    else:
        with prefect_ready(settings.home, settings.prefect, json=json):
            report = run(*asked)
    print_json(report_json(report)) if json else print_demo(report, live)
    raise typer.Exit(0 if report.ok else 1)


def _check_usage(request: TrainRequest) -> None:
    """Refuse options that contradict each other."""
    mode, windows = request.mode, request.overrides.get("windows", {})
    bounds = request.first or request.last or request.limit
    if request.window and mode is not Mode.SINGLE:
        raise typer.BadParameter(f"--window names one window: not with --mode {mode}")
    if request.hours and mode is not Mode.BACKFILL:
        raise typer.BadParameter(f"--backfill-hours is for --mode backfill, not {mode}")
    if bounds and mode is not Mode.BACKFILL:
        raise typer.BadParameter(f"--from, --to and --limit are for --mode backfill, not {mode}")
    if request.hours and request.first:
        raise typer.BadParameter("--backfill-hours and --from both set the begin: give one")
    if "frequency" in windows and mode is not Mode.CONTINUOUS:
        raise typer.BadParameter(f"--frequency is for --mode continuous, not {mode}")
    if "recipe" in windows and mode is Mode.CONTINUOUS:
        raise typer.BadParameter("--recipe trains past windows: not with --mode continuous")
    in_window = (request.window or "").partition("+")[2]
    if in_window and windows.get("recipe", in_window) != in_window:
        raise typer.BadParameter(f"--window {request.window} names another recipe than --recipe")
    named = "recipe" in windows or in_window
    if "include_late" in windows and not named:
        raise typer.BadParameter("--include-late trains nothing by itself: name a --recipe")


def _load_checked(request: TrainRequest) -> Settings:
    """Load the settings, and refuse at once what the flow would refuse seconds later.

    Raises:
        BabylonError: a window, scorer, trainer, evaluator or database that cannot be used.
    """
    from babylon.scoring.scorer import require_scorer
    from babylon.store.connection import read_clock
    from babylon.training.backends.trainer_requirements import require_trainer

    settings = load_settings(**request.overrides)
    if request.window is not None:
        window, now = parse_window_id(request.window, settings.windows.minutes), datetime.now(UTC)
        if window.end > now + timedelta(days=1):  # the database's clock decides about today
            check_settled(window, Clock(now=now), 0.0)
    first = parse_bound(request.first) if request.first else None
    end = parse_bound(request.last, last=True) if request.last else None
    if first and end and first >= end:
        raise typer.BadParameter(f"--from {request.first} is after --to {request.last}")
    require_scorer(settings.scoring.scorer, settings.judge)
    require_trainer(settings.training, settings.model)
    if settings.evaluation.evaluator:
        from babylon.evaluation.tasks.evaluator import load_evaluator  # imports openai, for 2 s

        load_evaluator(settings.evaluation.evaluator)
    if settings.database.url is not None:  # the flow itself starts an embedded one
        with_store(settings, read_clock)
    return settings


def _run(request: TrainRequest) -> list[WindowResult]:
    """Run the flow of the mode. In mode ``continuous`` a signal is the normal end."""
    from babylon.cli.progress import stage_progress

    with stage_progress():
        if request.mode is Mode.CONTINUOUS:
            results: list[WindowResult] = []
            with suppress(*stop_signals()):
                asyncio.run(_train_continuously(request, results))
            return results
        return asyncio.run(_train_past(request))


async def _train_past(request: TrainRequest) -> list[WindowResult]:
    from babylon.flows.backfill import backfill
    from babylon.flows.train_window import train_window

    if request.mode is Mode.SINGLE:
        return [await train_window(request.window, request.overrides)]
    return await backfill(
        request.hours,
        request.overrides,
        first=request.first,
        last=request.last,
        limit=request.limit,
    )


async def _train_continuously(request: TrainRequest, results: list[WindowResult]) -> None:
    """Append each result to ``results``, which the caller keeps when a signal ends this."""
    from babylon.flows.continuous import continuous

    async for result in continuous(request.overrides):
        results.append(result)


def _searched(request: TrainRequest, windows: WindowSettings) -> str | None:
    """Name the range that was searched for windows; None when one window was named."""
    if request.window:
        return None
    until = f" to {request.last}" if request.last else ""
    if request.first:
        return f"from {request.first}{until}"
    return f"of the last {request.hours or windows.lookback_hours} h{until}"

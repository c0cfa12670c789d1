"""``babylon baseline``: agilerl's algorithms on the market, as yardsticks of the LLM."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from babylon.cli.options import GameRules, Json, Preset, given
from babylon.cli.output import print_json, print_table, stderr
from babylon.core.errors import ModelError
from babylon.core.home import Home, make_directory, make_home
from babylon.core.settings import TrackingSettings
from babylon.core.settings_loading import load_settings

if TYPE_CHECKING:
    from babylon.dataset.replay.comparison import OpenStore
    from babylon.training.baselines.train import BaselineMember
    from babylon.training.baselines.transitions import Transitions

app = typer.Typer(help="Numeric policies, trained by agilerl, as yardsticks.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the baseline in this home.")]


@app.command()
def train(
    algorithm: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="dqn, rainbow, ddpg, td3, ppo, cqn, maddpg, matd3, ippo, neural-ucb or neural-ts.",
        ),
    ],
    rules: GameRules = Preset.STARTER,
    population: Annotated[int, typer.Option(min=1, metavar="N", help="Members.")] = 1,
    generations: Annotated[int, typer.Option(min=1, metavar="N", help="Generations to train.")] = 4,
    steps: Annotated[
        int | None, typer.Option(min=64, metavar="N", help="Steps of a member in a generation.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: algorithm and rules.")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="cqn: recorded windows, a month, a day or an id."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="cqn: a dataset. Default: the database.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of play and networks.")] = None,
    json: Json = False,
) -> None:
    """Train a numeric policy and export the elite; a run that was killed goes on."""
    from babylon.store import open_store
    from babylon.training.baselines.train import POLICY, BaselineRun, train_baseline

    # Without --windows nothing of the dataset would be read, and nobody would be told.
    if source is not None and windows is None:
        raise typer.BadParameter("--from says where --windows lie: give both")
    if windows is not None and algorithm != "cqn":
        raise typer.BadParameter(f"only cqn learns from recorded windows, not {algorithm}")
    settings = load_settings(**given(seed=seed))
    run = BaselineRun(
        algorithm=algorithm,
        rules=rules.value,
        population=population,
        seed=settings.seed,
        steps=steps,
        windows=windows,
        source=str(source.absolute()) if source else None,
    )
    directory = settings.home.baselines / (name or f"{algorithm}-{rules.value}")
    opened = partial(open_store, settings)  # not open yet: a dataset needs no database
    recorded = _recorded(opened, windows, source, rules.value) if windows else None
    make_home(settings.home.root)
    report, finish = _reporting(settings.home, settings.tracking, directory.name)
    members = train_baseline(directory, run, generations, recorded, report)
    finish()
    best = max(members, key=lambda member: member.pnl)
    if json:
        print_json({"members": [asdict(one) for one in members], "policy": directory / POLICY})
        return
    columns = ["generation", "member", "mutation", "P&L, $", "steps"]
    rows = [[m.generation, m.member, m.mutation, f"{m.pnl:+.1f}", m.steps] for m in members]
    print_table(f"{algorithm} on {rules.value}", columns, rows)
    print(f"elite {best.pnl:+.1f} $ a world: {directory / POLICY}")


@app.command()
def export(
    name: Name,
    to: Annotated[Path, typer.Option(metavar="DIRECTORY", help="A new directory.")],
    json: Json = False,
) -> None:
    """Export a trained elite to a directory of its own; `babylon arena` plays it by this path."""
    from babylon.training.baselines.train import export_elite

    if to.exists():
        raise ModelError(f"{to} exists: give --to a new directory")
    manifest = export_elite(load_settings().home.baselines / name, to)
    if json:
        print_json({"directory": to, **msgspec.to_builtins(manifest)})
    else:
        print(f"{manifest.algorithm}, {manifest.pnl:+.1f} $ a world: {to}")


def _recorded(opened: "OpenStore", windows: str, source: Path | None, rules: str) -> "Transitions":
    """Return recorded play, of a dataset or of the database, as transitions."""
    from babylon.dataset.replay.dataset_reader import read_dataset
    from babylon.evaluation.rebuild.recorded_windows import rebuild_windows, recorded_windows
    from babylon.evaluation.rebuild.transitions import transitions_of
    from babylon.game.market.scenario import PRESETS

    async def rebuilt() -> "Transitions":
        if source is not None:
            return transitions_of(read_dataset(source, windows).scenarios, PRESETS[rules])
        async with opened() as store:
            found = await rebuild_windows(store, await recorded_windows(store, windows))
        return transitions_of(found.scenarios, PRESETS[rules])

    return asyncio.run(rebuilt())


def _reporting(
    home: Home, tracking: TrackingSettings, name: str
) -> tuple[Callable[["BaselineMember"], None], Callable[[], None]]:
    """Return (report a member, finish): to stderr, and to W&B if a project is set."""
    tracked = None
    if tracking.project and tracking.mode != "disabled":
        import wandb

        make_directory(home.root / "wandb")
        tracked = wandb.init(
            project=tracking.project,
            mode=tracking.mode,
            dir=home.root / "wandb",
            name=f"baseline-{name}",
            settings=wandb.Settings(silent=True),
        )

    def report(member: "BaselineMember") -> None:
        stderr.print(f"generation {member.generation}, member {member.member}: {member.pnl:+.1f} $")
        if tracked is not None:
            tracked.log(asdict(member))

    return report, lambda: None if tracked is None else tracked.finish()

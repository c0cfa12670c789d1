"""``babylon agents``: a fleet that plays the simulated game through the gateway."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from babylon.cli.options import GameRules, Json, Preset, Shared, given
from babylon.cli.output import print_json, stderr, with_store
from babylon.core.settings_loading import load_settings

if TYPE_CHECKING:
    from babylon.game.fleet.play_fleet import FleetResult
    from babylon.store import Store

WEEK_MIN = 7 * 24 * 60
MOST_AGENTS = 100_000  # each takes memory before the first plays
app = typer.Typer(help="Agents that play the simulated game.", no_args_is_help=True)


@app.command()
def spawn(
    agents: Annotated[
        int, typer.Option(min=1, max=MOST_AGENTS, metavar="N", help="Number of agents.")
    ] = 5,
    duration: Annotated[
        int,
        typer.Option(
            min=1, max=WEEK_MIN, metavar="MINUTES", help="Game minutes; one decision each."
        ),
    ] = 10,
    policy: Annotated[
        str,
        typer.Option(
            metavar="llm|scripted|DIRECTORY",
            help="The gateway's model, scripts, or an exported numeric policy.",
        ),
    ] = "llm",
    rules: GameRules = Preset.STARTER,
    shared: Shared = False,
    live: Annotated[
        bool, typer.Option("--live", help="Play in real time. Default: at once, in past hours.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the markets.")] = None,
    json: Json = False,
) -> None:
    """Let agents play, and record every step as the game would."""
    from babylon.game.fleet.spawn import plan_fleet, run_fleet
    from babylon.game.market.scenario import PRESETS

    settings = load_settings(**given(seed=seed))
    with Progress(console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("rounds", total=None)

        def played(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        async def play(store: "Store") -> "FleetResult":
            plan = await plan_fleet(
                store,
                settings.windows,
                settings.seed,
                agents=agents,
                duration_min=duration,
                rules=PRESETS[rules.value],
                shared=shared,
                live=live,
            )
            return await run_fleet(store, settings, plan, policy, progress=played)

        result = with_store(settings, play)
    if json:
        print_json(asdict(result))
        return
    print(
        f"{result.trajectories} trajectories ({result.calls} decisions) of {agents} agents in"
        f" {result.scenarios} scenarios, mean P&L {result.mean_pnl:+.1f}"
    )
    if result.abandoned:
        print(
            f"{result.abandoned} tables were abandoned after a failed call: the log has the errors"
        )
    print(f"windows {', '.join(result.windows)}: see `babylon windows list`")

"""``babylon population``: the settings that evolve, and which of them led where."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, with_store
from babylon.core.settings_loading import load_settings

app = typer.Typer(help="Settings of an update that evolve.", no_args_is_help=True)


@app.command()
def show(
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the lineage: .png, .svg or .pdf.")
    ] = None,
    json: Json = False,
) -> None:
    """Show every generation: genes, fitness, parents, and the windows that a member won."""
    from babylon.ops.population_page import MemberStanding, population_standings
    from babylon.ops.population_plot import plot_lineage

    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{plot} does not end in .png, .svg or .pdf", param_hint="--plot")
    standings: list[MemberStanding] = with_store(load_settings(), population_standings)
    drawn = plot_lineage(standings, plot) if plot and standings else None
    if json:
        print_json({"members": [asdict(one) for one in standings], "plot": drawn and str(drawn)})
        return
    if not standings:
        print("no population yet: `babylon train --population 4`")
        return
    # Generations can differ in their genes: each gene has a column, empty where it did not evolve.
    genes = list(dict.fromkeys(name for one in standings for name in one.genes))
    columns = ["generation", "member", "parent", "origin", "fitness", "windows", "chosen", *genes]
    rows = [
        [
            one.generation,
            one.member,
            one.parent,
            one.origin,
            "" if one.fitness is None else f"{one.fitness:+.2f}{_margin(one.error)}",
            one.windows,
            one.chosen,
            *(_shown(one.genes.get(name)) for name in genes),
        ]
        for one in standings
    ]
    print_table("Population", columns, rows)
    if drawn:
        print(f"lineage: {drawn}")


def _margin(error: float | None) -> str:
    return "" if error is None else f" ± {error:.2f}"  # a failed update has its window's worst


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value if value is not None else "")

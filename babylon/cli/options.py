"""Options that several commands share."""

from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
MinAgents = Annotated[
    int | None, typer.Option(min=2, help="Agents that a window needs.", metavar="N")
]
MinActions = Annotated[
    int | None, typer.Option(min=1, help="Actions that a trajectory needs.", metavar="N")
]
WindowMinutes = Annotated[int | None, typer.Option(help="Length of a window.", metavar="M")]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given, as overrides of settings by group."""
    overrides: dict[str, Any] = {}
    for name, value in options.items():
        kept = given(**value) if isinstance(value, dict) else value
        if kept is not None and kept != {}:
            overrides[name] = kept
    return overrides

"""``babylon agents``: a fleet that plays the simulated game through the gateway."""

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json
from babylon.settings import load_settings

app = typer.Typer(help="Agents that play the simulated game.", no_args_is_help=True)


class Policy(StrEnum):
    SCRIPTED = "scripted"
    LLM = "llm"


@app.callback()
def _group() -> None:
    """Keeps ``spawn`` a command of its own while it is the only one."""


@app.command()
def spawn(
    agents: Annotated[int, typer.Option(min=1, metavar="N", help="How many.")] = 5,
    duration: Annotated[float, typer.Option(metavar="MINUTES", help="How long they play.")] = 10,
    policy: Annotated[Policy, typer.Option(help="Scripted, or through the gateway.")] = Policy.LLM,
    json: Json = False,
) -> None:
    """Let agents play now, and record every step as the game would."""
    from babylon.market.fleet import spawn_agents

    report = asyncio.run(
        spawn_agents(load_settings(), agents=agents, minutes=duration, policy=policy.value)
    )
    if json:
        print_json(report)
    else:
        for name, value in report.items():
            print(f"{name:16} {value}")

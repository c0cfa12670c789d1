"""``babylon keys``: who may call the gateway, and for which agents."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from babylon.cli.model import show_values, with_store
from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table
from babylon.core.api_keys import SCOPES

if TYPE_CHECKING:
    from babylon.store import Store

app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="For people: whose key it is.")]
Scope = Annotated[
    list[str] | None,
    typer.Option("--scope", help=f"{', '.join(SCOPES)}; repeat for several. Default: infer."),
]
Agent = Annotated[
    list[str] | None,
    typer.Option(
        "--agent", help="An agent it may speak for, or crowd-*; repeatable. Default: any."
    ),
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Calls at a time. Default: any number.")
]


@app.command()
def create(
    name: Name,
    scope: Scope = None,
    agent: Agent = None,
    concurrency: Concurrency = None,
    json: Json = False,
) -> None:
    """Make a key and show it, this one time: only its hash is kept."""

    async def made(store: "Store") -> dict[str, Any]:
        from babylon.store.api_keys import create_key

        key = await create_key(
            store,
            name,
            scopes=scope or ["infer"],
            agents=agent or None,
            max_concurrency=concurrency,
        )
        return {"key_id": key.key_id, "name": name, "key": str(key)}

    show_values(asyncio.run(with_store(made)), json)


@app.command("list")
def list_(json: Json = False) -> None:
    """Every key that was made, without its secret."""

    async def all_of_them(store: "Store") -> list[dict[str, Any]]:
        from babylon.store.api_keys import list_keys

        keys = [asdict(key) for key in await list_keys(store)]
        return [{name: key[name] for name in key if name != "digest"} for key in keys]

    keys = asyncio.run(with_store(all_of_them))
    if json:
        print_json({"keys": keys})
        return
    columns = ["key_id", "name", "scopes", "agents", "max_concurrency", "created_at", "revoked_at"]
    print_table("API keys", columns, [[_shown(key[name]) for name in columns] for key in keys])


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="See `babylon keys list`.")],
    json: Json = False,
) -> None:
    """Take a key out of force; gateways refuse it at once."""

    async def revoked(store: "Store") -> dict[str, Any]:
        from babylon.store.api_keys import revoke_key

        await revoke_key(store, key_id)
        return {"revoked": key_id}

    show_values(asyncio.run(with_store(revoked)), json)


def _shown(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, tuple) else value

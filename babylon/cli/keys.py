"""``babylon keys``: API keys of the gateway, and the agents for which they may call."""

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated

import typer

from babylon.cli.options import MAX_INTEGER, Json
from babylon.cli.output import print_json, print_table, show_values, with_store
from babylon.core.api_keys import SCOPES
from babylon.core.settings_loading import load_settings

app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name that tells keys apart.")]
Scope = Annotated[
    list[str] | None,
    typer.Option(
        "--scope", help=f"One of {', '.join(SCOPES)}; repeatable. Default: infer and record."
    ),
]
Agent = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        help="Agent that may use the key, or crowd-* for a prefix; repeatable. Default: all.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_INTEGER, metavar="N", help="Simultaneous calls. Default: no limit."
    ),
]

Rpm = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_INTEGER, metavar="N", help="Requests in a minute. Default: no limit."
    ),
]
Tpm = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_INTEGER,
        metavar="N",
        help="Tokens in a minute, prompts too. Default: no limit.",
    ),
]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="See `babylon keys list`.")]


@app.command()
def create(
    name: Name,
    scope: Scope = None,
    agent: Agent = None,
    concurrency: Concurrency = None,
    requests_per_minute: Rpm = None,
    tokens_per_minute: Tpm = None,
    json: Json = False,
) -> None:
    """Make a key and print it. It is printed only once, because only its hash is stored."""
    from babylon.store.api_keys import create_key

    settings = load_settings()
    key = with_store(
        settings,
        create_key,
        name,
        scopes=scope or ["infer", "record"],
        agents=agent or None,
        max_concurrency=concurrency,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    url = f"{settings.serving.agents_url}/v1"
    show_values({"key_id": key.key_id, "name": name, "key": str(key), "url": url}, json)


@app.command("list")
def list_(json: Json = False) -> None:
    """List all keys, revoked ones too, without their secrets."""
    from babylon.store.api_keys import list_keys

    keys = [asdict(key) for key in with_store(load_settings(), list_keys)]
    if json:
        hidden = ("digest", "former_digest")
        print_json({"keys": [{n: key[n] for n in key if n not in hidden} for key in keys]})
        return
    times = ["created_at", "rotated_at", "revoked_at"]
    columns = ["key_id", "name", "scopes", "agents", "limits", *times]
    rows = [key | {"limits": _limits(key)} for key in keys]
    print_table(
        "API keys",
        [name.removesuffix("_at") for name in columns],
        [[_cell(key[name]) for name in columns] for key in rows],
    )


@app.command()
def rotate(
    key_id: KeyId,
    overlap_hours: Annotated[
        float,
        typer.Option(
            min=0, max=8760, metavar="H", help="Hours in which the present secret still works."
        ),
    ] = 24.0,
    json: Json = False,
) -> None:
    """Give a key another secret and print it. Its trajectories, limits and rules stay its own.

    A revoked key is in force again.
    """
    from babylon.store.api_keys import rotate_key

    overlap = timedelta(hours=overlap_hours)
    key = with_store(load_settings(), rotate_key, key_id, overlap)
    show_values({"key_id": key.key_id, "key": str(key)}, json)


@app.command()
def revoke(key_id: KeyId, json: Json = False) -> None:
    """Revoke a key. The gateways refuse it at once."""
    from babylon.store.api_keys import revoke_key

    with_store(load_settings(), revoke_key, key_id)
    show_values({"revoked": key_id}, json)


def _limits(key: dict[str, object]) -> str:
    units = {
        "max_concurrency": "at a time",
        "requests_per_minute": "requests/min",
        "tokens_per_minute": "tokens/min",
    }
    return ", ".join(f"{key[name]} {unit}" for name, unit in units.items() if key[name])


def _cell(value: object) -> object:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    return ", ".join(value) if isinstance(value, tuple) else value

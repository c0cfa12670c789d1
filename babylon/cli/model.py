"""``babylon model``: the base model and every policy trained from it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, stderr
from babylon.core.settings import Settings, load_settings
from babylon.deployment.checks.check_result import as_lines
from babylon.training.update_health import figure, in_order, warnings

if TYPE_CHECKING:
    from babylon.store import Store

app = typer.Typer(help="The base model and its policies.", no_args_is_help=True)
Version = Annotated[int, typer.Argument(min=0, metavar="VERSION", help="Policy version.")]


@app.command()
def init(json: Json = False) -> None:
    """Make or find the base model and register it as policy 0."""
    settings = load_settings()
    with Progress(console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("embedded model", total=None)
        uri = asyncio.run(
            _init(settings, lambda done, total: progress.update(bar, completed=done, total=total))
        )
    show_values({"base_model": uri, "policy_version": 0}, json)


@app.command("list")
def list_(json: Json = False) -> None:
    """Every policy, the champion marked, and those whose checkpoints were removed."""
    policies = asyncio.run(with_store(_policies))
    if json:
        print_json({"policies": policies})
        return
    columns = ["version", "champion", "parent", "kind", "window", "removed", "promoted", "reason"]
    rows = [
        [
            p["policy_version"],
            "*" if p["champion"] else "",
            p["parent_version"],
            p["kind"],
            p["window_id"],
            p["removed_at"] and f"{p['removed_at']:%Y-%m-%d}",
            (p["verdict"] or {}).get("promote"),
            (p["verdict"] or {}).get("reason"),
        ]
        for p in policies
    ]
    print_table("Policies", columns, rows)


@app.command()
def show(version: Version, json: Json = False) -> None:
    """One policy: where its weights are, its metrics, verdict and checks, and what is odd there."""

    async def one(store: "Store") -> dict[str, Any]:
        from babylon.store.policies import get_policy

        policy = await get_policy(store, version)
        return asdict(policy) | {"metrics": in_order(policy.metrics)}

    policy = asyncio.run(with_store(one))
    if not json and policy["checks"]:
        policy["checks"] = as_lines(policy["checks"])
    show_values(policy, json)
    if not json:
        for warning in warnings(policy["metrics"]):
            print(f"! {warning}")


async def _init(settings: Settings, progress: Callable[[int, int], None]) -> str:
    from babylon.stages.train import ensure_champion
    from babylon.store import open_store
    from babylon.store.policies import get_policy

    async with open_store(settings) as store:
        await ensure_champion(store, settings, progress=progress)
        return (await get_policy(store, 0)).uri


async def _policies(store: "Store") -> list[dict[str, Any]]:
    from babylon.store.policies import champion, list_policies

    policies = await list_policies(store)
    serving = (await champion(store))[0].policy_version if policies else None
    return [asdict(p) | {"champion": p.policy_version == serving} for p in policies]


async def with_store(use: "Callable[[Store], Awaitable[Any]]") -> Any:
    from babylon.store import open_store

    async with open_store(load_settings()) as store:
        return await use(store)


def show_values(values: dict[str, Any], json: bool) -> None:
    if json:
        print_json(values)
    else:
        lines = list(flat(values))
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            print(f"{name:{width}}  {figure(value)}")


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """One line a value: ``metrics.ess``, ``gateways.0.url``."""
    for name, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, dict) and inner:
            yield from flat({str(key): one for key, one in inner.items()}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if value in ([], (), {}) else value

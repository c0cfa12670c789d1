"""Helpers of several command modules: a call with an open store, and values printed as lines."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import typer

from babylon.cli.output import print_json
from babylon.core.settings import Settings
from babylon.training.update_health import figure

T = TypeVar("T")
Version = Annotated[int, typer.Argument(min=0, metavar="VERSION", help="Policy version.")]


def with_store(
    settings: Settings,
    function: Callable[..., Coroutine[Any, Any, T]],
    *arguments: object,
    **options: object,
) -> T:
    """Open the store and return ``await function(store, *arguments, **options)``."""
    from babylon.store import open_store

    async def call() -> T:
        async with open_store(settings) as store:
            return await function(store, *arguments, **options)

    return asyncio.run(call())


def show_values(values: Mapping[str, object], json: bool) -> None:
    """Print one JSON object, or one line for each value."""
    if json:
        print_json(values)
        return
    lines = list(_flat(values))
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        print(f"{name:{width}}  {figure(value)}")


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield nested values under dotted names: ``metrics.ess``, ``gateways.0.url``."""
    for name, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, dict) and inner:
            yield from _flat({str(key): one for key, one in inner.items()}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if value in ([], (), {}) else value

"""Promise: ask the fleet about its champion where a window ends before its deployment would."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from babylon.core.errors import WindowNotReadyError
from babylon.core.types import Change, Claim
from babylon.deployment.keep_promise import keep_promise
from babylon.store import Store
from babylon.store.routes import list_routes
from babylon.tasks.stage import run_after, stage


@asynccontextmanager
async def promise_kept(store: Store, seed: int, model: str, claim: Claim) -> AsyncIterator[None]:
    """Ask also if the block ends without anything to train on.

    A champion that collapsed gives all its plays equal scores, or none that is valid. The windows
    that teach nothing then show best that it must go.
    """
    try:
        yield
    except WindowNotReadyError:
        await run_after(claim.window_id, promise, store, seed, model, claim)
        raise


@stage("promise")
async def promise(store: Store, seed: int, model: str, claim: Claim) -> Change | None:
    """Return the change of the route, if the fleet surely earns more with an earlier policy."""
    for route in await list_routes(store, limit=1):
        return await keep_promise(store, seed, route, claim, model)
    return None  # no policy serves yet

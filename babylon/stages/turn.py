"""A window's turn to train: the policy line is free, and no experiment runs.

Collecting and scoring of several windows may overlap. From training to deployment one window is at
work at a time, because each update starts from the champion that the window before it left.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from babylon.core.errors import ExperimentRunningError
from babylon.core.settings import WindowSettings
from babylon.core.types import Claim
from babylon.core.windows import Window, parse_window_id
from babylon.store.connection import Store
from babylon.store.line import take_line
from babylon.store.routes import current_route, list_routes

log = logging.getLogger(__name__)
LOOKS = 20  # at the line in one lease: every three seconds by default


async def wait_for_turn(
    store: Store,
    windows: WindowSettings,
    claim: Claim,
    finish: Callable[[Window], Awaitable[object]],
) -> None:
    """Return when the window holds the policy line. The log names the window that goes before it.

    ``finish`` validates and deploys a half-finished window that no run works on. It must not raise:
    a window that cannot be finished rests, and then holds nobody up. One that cannot be claimed,
    because the game's database is down, is tried again after a pause.

    Raises:
        FencedError: another worker took over the window.
    """
    said = tried = ""
    while before := await take_line(store, claim):
        if said != before.reason:
            log.info("window %s waits for its turn: %s", claim.window_id, before.reason)
            said = before.reason
        if before.half_finished and before.window_id != tried:
            tried = before.window_id
            await finish(parse_window_id(before.window_id, before.minutes))
        else:
            tried = ""
            await asyncio.sleep(windows.lease_s / LOOKS)


async def experiment_runs(store: Store) -> bool:
    routes = await list_routes(store, limit=1)
    return bool(routes) and routes[0].split is not None


async def require_no_experiment(store: Store, claim: Claim) -> None:
    """Check that the experiment was decided.

    While it goes on, nobody knows which policy the next update should start from, so no window is
    trained: its play stays free and its scores are kept. An update of the champion could not be
    deployed beside the challenger, and one of the challenger would fall with it.

    Raises:
        ExperimentRunningError: it goes on.
    """
    route = await current_route(store)
    if route.split is not None:
        raise ExperimentRunningError(
            f"policy {route.challenger_version} is compared with policy {route.policy_version}:"
            f" window {claim.window_id} is scored, and is trained when that is decided"
        )

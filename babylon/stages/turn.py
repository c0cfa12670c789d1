"""A window's turn to train: the policy line is free, and no experiment runs.

Collecting and scoring of several windows may overlap. From training to deployment one window is at
work at a time, because each update starts from the champion that the window before it left.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

from babylon.core.errors import ExperimentRunningError
from babylon.core.settings import WindowSettings
from babylon.core.types import Claim
from babylon.core.windows import Window, WindowState, parse_window_id
from babylon.store.connection import UNREACHABLE, Store
from babylon.store.experiments import newest_decision
from babylon.store.line import Before, take_line
from babylon.store.routes import current_route, list_routes
from babylon.store.windows import get_window

log = logging.getLogger(__name__)
LOOKS = 20  # at the line in one lease: every three seconds by default
REVIEWED = timedelta(minutes=10)  # since the newest review: the schedule looks each quarter hour
UNDECIDED = "insufficient"  # the decision of a review after which an experiment goes on


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
    while before := await _before(store, windows, claim):
        if said != before.reason:
            log.info("window %s waits for its turn: %s", claim.window_id, before.reason)
            said = before.reason
        if before.half_finished and before.window_id != tried:
            tried = before.window_id
            await finish(parse_window_id(before.window_id, before.minutes))
        else:
            tried = ""
            await asyncio.sleep(windows.lease_s / LOOKS)


async def _before(store: Store, windows: WindowSettings, claim: Claim) -> Before | None:
    """Take the line. A wait of hours outlasts each outage that is shorter than the lease."""
    for _ in range(LOOKS):
        try:
            return await take_line(store, claim)
        except UNREACHABLE as error:
            log.warning("window %s cannot look for its turn now: %r", claim.window_id, error)
            await asyncio.sleep(windows.lease_s / LOOKS)
    return await take_line(store, claim)


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


async def waits_undecided(store: Store, window_id: str) -> str:
    """Return why a run of a scored window could only wait again; empty if it may do more.

    A week of windows may wait for an experiment. Each of their runs would review it.
    """
    row = await get_window(store, window_id)
    if row is None or row.state != WindowState.SCORED or row.lost:
        return ""
    routes = await list_routes(store, limit=1)
    if not routes or (split := routes[0].split) is None:
        return ""
    if await newest_decision(store, split.salt, REVIEWED) != UNDECIDED:
        return ""
    return (
        f"policy {split.challenger_version} is compared with policy {routes[0].policy_version}, and"
        " the newest review decides nothing"
    )

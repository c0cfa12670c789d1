"""Events of windows and policies, read from Postgres and sent to Prefect.

Postgres holds the changes of workers, terminals, the command line and the status page alike. A
supervisor, or a worker of the pool ``cpu``, therefore reads them there, and this module alone names
the events.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import NAMESPACE_URL, UUID, uuid5

import aiohttp
import asyncpg

from babylon.core.settings import WindowSettings
from babylon.core.windows import MAX_ATTEMPTS, Clock
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.prefect_call import call
from babylon.ops.up.turns import telling
from babylon.stages.freshness import stale_play
from babylon.store import Store
from babylon.store.approvals import Approval, open_approvals
from babylon.store.connection import clock_of
from babylon.store.flow_state import newest_play

LOOK_S = 30.0
SETTLE_S = 10.0  # Prefect writes events after five seconds, and the next teller asks it for them
BACK = timedelta(hours=1)  # so that a restart loses nothing
# Prefect forgets an event after seven days, and would then alert again at each start.
_MEMORY = timedelta(days=6)
_PAGE = 50  # events that Prefect's API returns at most
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsItem:
    """Something that happened. ``message`` is one sentence without prompts and ground truth.

    ``subject`` is the window or policy; news of the same ``mark`` about it is the same news.
    """

    event: str
    subject: str
    mark: str
    at: datetime
    message: str

    @property
    def key(self) -> UUID:
        """The same for the same news, so that Prefect keeps it once."""
        return uuid5(NAMESPACE_URL, f"babylon/{self.event}/{self.subject}/{self.mark}")

    def body(self) -> dict[str, object]:
        """The event as Prefect's API takes it."""
        return {
            "id": str(self.key),
            "occurred": self.at.isoformat(),
            "event": f"babylon.{self.event}",
            "resource": {"prefect.resource.id": f"babylon.{self.subject}"},
            "payload": {"message": self.message},
        }


async def tell_news(
    opening: Callable[[], AbstractAsyncContextManager[Store]],
    windows: WindowSettings,
    http: aiohttp.ClientSession,
    api: PrefectApi,
) -> None:
    """Send new events to Prefect until cancelled. Events that it does not take are sent later.

    Processes of one database take turns, so that each event alerts once.
    """
    since: datetime | None = None
    told = set[UUID]()
    while True:
        try:
            async with opening() as store, telling(store) as ours:
                if ours:
                    now = (await _clock(store)).now
                    found = await read_news(store, windows, since or now - BACK)
                    # Prefect's memory is longer: this process may have started just now, or have
                    # forgotten news of a window that changed again, and others tell news too.
                    keys = [one.key for one in found if one.key not in told]
                    told |= await _heard(http, api, keys)
                    if fresh := [one.body() for one in found if one.key not in told]:
                        await call(http, api, "POST", "events", fresh)
                        await asyncio.sleep(SETTLE_S)
                    told = {one.key for one in found}
                    since = now - BACK  # again, because a commit becomes visible after its time
        except Exception as error:  # nothing here may end the supervisor, and with it all services
            log.warning("news cannot be told to Prefect now: %r", error)
        await asyncio.sleep(LOOK_S)


async def _heard(http: aiohttp.ClientSession, api: PrefectApi, keys: Sequence[UUID]) -> set[UUID]:
    """Return the news that Prefect has. It keeps an event once, but would alert once more."""
    heard: set[UUID] = set()
    for start in range(0, len(keys), _PAGE):
        ids = [str(key) for key in keys[start : start + _PAGE]]
        page = await call(http, api, "POST", "events/filter", {"filter": {"id": {"id": ids}}})
        heard |= {UUID(event["id"]) for event in page["events"]}
    return heard


async def read_news(store: Store, windows: WindowSettings, since: datetime) -> list[NewsItem]:
    """Return what happened since a moment, and what is wrong at present; oldest first."""
    clock = await _clock(store)
    found = [_begun(row) for row in await store.pool.fetch(_BEGUN, since)]
    found += [_of_attempt(row) for row in await store.pool.fetch(_ATTEMPTS, since)]
    found += [_stuck(row) for row in await store.pool.fetch(_STUCK, MAX_ATTEMPTS, _MEMORY)]
    found += [_of_route(row) for row in await store.pool.fetch(_ROUTES, since)]
    found += [_asked(one) for one in await open_approvals(store)]
    found += [_late(row) for row in await store.pool.fetch(_LATE, since)]
    found += [_drift(row) for row in await store.pool.fetch(_DRIFT, since)]
    found += [_budget(row) for row in await store.pool.fetch(_BUDGET, since)]
    newest = await newest_play(store)
    if newest and (alarm := stale_play(newest, windows, clock)):
        found.append(
            NewsItem(
                event="data.stale", subject="data", mark=f"{newest}", at=clock.now, message=alarm
            )
        )
    return sorted(found, key=lambda one: one.at)


async def _clock(store: Store) -> Clock:
    """Read our own database's clock, because that of the game may be away."""
    async with store.pool.acquire() as connection:
        return await clock_of(connection)


_BEGUN = """
SELECT window_id, began_at FROM babylon.attempts one WHERE began_at > $1 AND NOT EXISTS (
    SELECT FROM babylon.attempts WHERE window_id = one.window_id AND epoch < one.epoch)
"""


def _begun(row: asyncpg.Record) -> NewsItem:
    return NewsItem(
        event="window.ready",
        subject=f"window.{row['window_id']}",
        mark="",
        at=row["began_at"],
        message=f"window {row['window_id']} is ready: a run began to train it",
    )


_EVENTS = {
    "deployed": "window.finished",
    "rejected": "checkpoint.rejected",
    "skipped": "window.skipped",
    "failed": "window.failed",
    "lost": "window.stuck",
}
_ATTEMPTS = f"""
SELECT window_id, epoch, ended_at, ending, reason FROM babylon.attempts
WHERE ended_at > $1 AND ending IN ({", ".join(f"'{ending}'" for ending in _EVENTS)})
"""


def _of_attempt(row: asyncpg.Record) -> NewsItem:
    return NewsItem(
        event=_EVENTS[row["ending"]],
        subject=f"window.{row['window_id']}",
        mark=f"{row['epoch']}",
        at=row["ended_at"],
        message=f"window {row['window_id']} is {row['ending']}: {row['reason'] or 'no reason'}",
    )


def _asked(question: Approval) -> NewsItem:
    version = question.policy_version
    return NewsItem(
        event="approval.asked",
        subject=f"policy.{version}",
        mark="",
        at=question.asked_at,
        message=f"policy {version} of window {question.window_id} waits for `babylon deploy approve"
        f" {version}` until {question.open_until:%Y-%m-%d %H:%M} UTC",
    )


# A lost window is taken up at once, unless its tries are used up.
_STUCK = """
SELECT window_id, epoch, updated_at, reason FROM babylon.windows
WHERE attempts >= $1 AND state NOT IN ('deployed', 'rejected', 'skipped')
  AND coalesce(lease_until <= now(), true) AND updated_at > now() - $2::interval
"""


def _stuck(row: asyncpg.Record) -> NewsItem:
    return NewsItem(
        event="window.stuck",
        subject=f"window.{row['window_id']}",
        mark=f"given up {row['epoch']}",
        at=row["updated_at"],
        message=f"window {row['window_id']} is not tried any more"
        f" ({row['reason'] or 'it was lost'}): `babylon windows retry {row['window_id']}`",
    )


# A change of the champion, or the end of a challenger's turn. ``back``: the champion led before.
_ROUTES = """
SELECT route.*, earlier.policy_version AS policy_before,
    earlier.challenger_version AS challenger_before,
    EXISTS (SELECT FROM babylon.routes led WHERE led.policy_version = route.policy_version
        AND led.route_version < route.route_version) AS back
FROM babylon.routes route
JOIN babylon.routes earlier ON earlier.route_version = route.route_version - 1
WHERE route.created_at > $1 AND (route.policy_version <> earlier.policy_version
    OR earlier.challenger_version IS NOT NULL AND route.challenger_version IS NULL)
"""


def _of_route(row: asyncpg.Record) -> NewsItem:
    policy, before = row["policy_version"], row["policy_before"]
    if policy != before:
        event = "model.rolled_back" if row["back"] else "model.promoted"
        message = f"policy {policy} serves in place of policy {before}"
    else:
        event, policy = "model.rolled_back", row["challenger_before"]
        message = f"the challenger, policy {policy}, serves no more"
    return NewsItem(
        event=event,
        subject=f"policy.{policy}",
        mark=f"{row['route_version']}",
        at=row["created_at"],
        message=f"{message}, by {row['author']}: {row['reason']}",
    )


_LATE = """
SELECT window_id, count(*) AS rows, max(seen_at) AS at FROM babylon.late
WHERE seen_at > $1 GROUP BY window_id
"""


def _late(row: asyncpg.Record) -> NewsItem:
    return NewsItem(
        event="data.late",
        subject=f"window.{row['window_id']}",
        mark=f"{row['at']}",
        at=row["at"],
        message=f"{row['rows']} rows of window {row['window_id']} were committed after it was"
        " collected",
    )


_DRIFT = "SELECT * FROM babylon.window_health WHERE measured_at > $1 AND alarms <> '[]'"


def _drift(row: asyncpg.Record) -> NewsItem:
    reasons = "; ".join(alarm["reason"] for alarm in row["alarms"])
    return NewsItem(
        event="data.drift",
        subject=f"window.{row['window_id']}",
        # Each attempt measures the window again, with other numbers in its reasons.
        mark=",".join(sorted(alarm["figure"] for alarm in row["alarms"])),
        at=row["measured_at"],
        message=f"window {row['window_id']} is unlike those before it: {reasons}",
    )


_BUDGET = """
SELECT window_id, epoch, updated_at, metrics ->> 'judge_level' AS level FROM babylon.windows
WHERE updated_at > $1 AND metrics ->> 'judge_level' <> 'full'
"""


def _budget(row: asyncpg.Record) -> NewsItem:
    return NewsItem(
        event="judge.budget",
        subject=f"window.{row['window_id']}",
        mark=row["level"],
        at=row["updated_at"],
        message=f"the judge's budget was too small for window {row['window_id']}: it was judged"
        f" at level {row['level']}",
    )

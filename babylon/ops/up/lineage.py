"""Lineage of the windows for a catalogue of data: OpenLineage events over HTTP.

Each claim of a window is a run of the job ``train-window``: it reads the play and the policy before
the update, and writes a version of the policy. The events are read from Postgres, like the news, so
that runs of workers, terminals and loops are reported alike. Source: https://openlineage.io/spec.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, UUID, uuid5

import attr
from openlineage.client import OpenLineageClient, event_v2, facet_v2
from openlineage.client.facet_v2 import RunFacet
from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport
from pydantic import SecretStr

import babylon
from babylon.core.discretion import without_passwords
from babylon.core.settings import TrackingSettings
from babylon.core.windows import parse_window_id
from babylon.ops.up.news import BACK, LOOK_S
from babylon.store import Store
from babylon.store.attempts import Attempt, attempts_since
from babylon.store.connection import read_clock
from babylon.store.policies import policy_of_window
from babylon.store.windows import get_window

TIMEOUT_S = 10.0
_PRODUCER = f"urn:babylon-rl:{babylon.__version__}"
_COMPLETE = {"deployed", "rejected", "skipped"}
_STATES = event_v2.RunState
# Refusals of the key, the address or the moment: other events would be refused too.
_NOT_THE_EVENT = {401, 403, 404, 405, 408, 429}
log = logging.getLogger(__name__)


async def tell_lineage(
    opening: Callable[[], AbstractAsyncContextManager[Store]],
    tracking: TrackingSettings,
    model: str,
    game: SecretStr | None,
) -> None:
    """Send the events of each claim to ``OPENLINEAGE_URL`` until cancelled.

    ``game``: address of the game's database. A receiver that is away gets the events later, and one
    that it refuses for good is left out. After a restart the last hour is sent again: receivers
    know a run by its id.
    """
    client, told = _client(tracking), set[tuple[UUID, str]]()
    since: datetime | None = None
    while True:
        try:
            async with opening() as store:
                now = (await read_clock(store)).now
                place = await _place(store, game)
                found = [
                    event
                    for attempt in await attempts_since(store, since or now - BACK)
                    for event in await _events(store, attempt, place, tracking, model)
                ]
            for event in found:
                key = (UUID(event.run.runId), str(event.eventType))
                if key not in told:
                    await _emit(client, event, tracking)
                    told.add(key)
            # Older ones are not found again.
            told.intersection_update((UUID(one.run.runId), str(one.eventType)) for one in found)
            since = now - BACK
        except Exception as error:  # nothing here may end the supervisor, and with it all services
            shown = _shown(tracking, error)
            log.warning("lineage cannot be sent now to %s", shown)
        await asyncio.sleep(LOOK_S)


async def _emit(
    client: OpenLineageClient, event: event_v2.RunEvent, tracking: TrackingSettings
) -> None:
    """Send an event. One that is refused for good is logged, because it would block all later."""
    try:
        await asyncio.to_thread(client.emit, event)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if not 400 <= status < 500 or status in _NOT_THE_EVENT:
            raise
        name = f"{event.eventType} of run {event.run.runId}"
        log.error("the event %s is left out: refused by %s", name, _shown(tracking, error))


def _shown(tracking: TrackingSettings, error: Exception) -> str:
    # The error of a refusal quotes the whole address.
    return without_passwords(f"{tracking.lineage_url}: {error!r}")


def _client(tracking: TrackingSettings) -> OpenLineageClient:
    assert tracking.lineage_url is not None
    config = HttpConfig(url=tracking.lineage_url, timeout=TIMEOUT_S)
    if tracking.lineage_key:
        key = {"apiKey": tracking.lineage_key.get_secret_value()}
        config = attr.evolve(config, auth=ApiKeyTokenProvider(key))
    return OpenLineageClient(transport=HttpTransport(config))


async def _place(store: Store, game: SecretStr | None) -> tuple[str, str]:
    """Return namespace and name of the game's database, as OpenLineage names a Postgres."""
    row = await store.game.fetchrow(
        "SELECT current_database() AS name, host(inet_server_addr()) AS host,"
        " inet_server_port() AS port"
    )
    assert row is not None
    host = urlsplit(game.get_secret_value()).hostname if game else None
    return f"postgres://{host or row['host'] or 'localhost'}:{row['port'] or 5432}", row["name"]


async def _events(
    store: Store, attempt: Attempt, place: tuple[str, str], tracking: TrackingSettings, model: str
) -> list[event_v2.RunEvent]:
    """Return the begin of a claim, and its end if it has one."""
    row = await get_window(store, attempt.window_id)
    assert row is not None  # it was claimed
    trained = attempt.ending in ("deployed", "rejected")
    policy = await policy_of_window(store, attempt.window_id) if trained else None
    window = parse_window_id(attempt.window_id, row.minutes)
    facets: dict[str, RunFacet] = {
        "nominalTime": facet_v2.nominal_time_run.NominalTimeRunFacet(
            window.start.isoformat(), window.end.isoformat()
        ),
        "processing_engine": facet_v2.processing_engine_run.ProcessingEngineRunFacet(
            version=babylon.__version__, name="babylon-rl"
        ),
    }
    namespace, database = place
    plays = [
        event_v2.InputDataset(namespace, f"{database}.{table}")
        for table in ("public.trajectories", "babylon.calls")
    ]
    own, named = tracking.lineage_namespace, f"policy/{model}"
    job = event_v2.Job(own, "train-window")
    run_id = str(uuid5(NAMESPACE_URL, f"babylon/{own}/{attempt.window_id}/{attempt.epoch}"))
    outputs = []
    # One dataset a model, with a version a policy: a catalogue stays small over months.
    if policy:
        before, after = _version(policy.parent_version), _version(policy.policy_version)
        plays.append(event_v2.InputDataset(own, named, facets=before))
        outputs.append(event_v2.OutputDataset(own, named, facets=after))

    def event(state: event_v2.RunState, at: datetime) -> event_v2.RunEvent:
        ended = state != _STATES.START
        return event_v2.RunEvent(
            eventTime=at.isoformat(),
            eventType=state,
            run=event_v2.Run(run_id, {**facets, **(_error(attempt) if ended else {})}),
            job=job,
            inputs=plays,
            outputs=outputs if ended else [],
            producer=_PRODUCER,
        )

    begun = event(_STATES.START, attempt.began_at)
    if attempt.ended_at is None:
        return [begun]
    state = _STATES.COMPLETE if attempt.ending in _COMPLETE else _STATES.ABORT
    return [begun, event(_STATES.FAIL if attempt.ending == "failed" else state, attempt.ended_at)]


def _error(attempt: Attempt) -> dict[str, RunFacet]:
    if attempt.ending in _COMPLETE:
        return {}
    text = f"{attempt.ending}: {attempt.reason or 'no reason'}"
    return {"errorMessage": facet_v2.error_message_run.ErrorMessageRunFacet(text, "python")}


def _version(policy_version: int | None) -> dict[str, facet_v2.DatasetFacet]:
    number = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(str(policy_version))
    return {"version": number}

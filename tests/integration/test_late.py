"""Late rows and open transactions, on a real Postgres."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from babylon.core.errors import FencedError, WindowNotReadyError
from babylon.core.windows import FINISHED, Window, WindowState, window_at
from babylon.stages.collect import collect_window
from babylon.store import late
from babylon.store.connection import clock_of, read_clock
from babylon.store.late import admit_late, count_late, list_late, note_late, store_collected
from babylon.store.published import withhold
from babylon.store.windows import claim_window, get_window, set_state
from tests.conftest import real_rows
from tests.integration.game import WINDOW, claim, insert, insert_trajectories

ONE, TWO = {"trajectoryId": "one"}, {"trajectoryId": "two"}
WITHOUT_ID = {"trajectoryId": "three", "windowId": None, "startTime": "2025-11-14T09:59:59.9"}
NEXT_HOUR = {"trajectoryId": "four", "windowId": None, "startTime": "2025-11-14T10:00"}
WRITE = "INSERT INTO \"User\" (id) VALUES ('somebody')"


async def trained(store):
    """The window, trained on its only trajectory."""
    await insert_trajectories(store, ONE)
    held = await claim(store)
    await store_collected(store, held, ["one"])
    await set_state(store, held, WindowState.TRAINED)
    await store.pool.execute("INSERT INTO babylon.trained VALUES ('one', $1, 'b')", WINDOW.id)


async def arrive(store, *changes):
    """More rows of the agent that played before."""
    sound = real_rows("trajectories")[0]
    rows = [{**sound, "id": change["trajectoryId"], **change} for change in changes]
    await insert(store, "trajectories", rows)


async def test_what_a_trained_window_had_not_collected_is_late_and_noted_once(store):
    await trained(store)
    assert await note_late(store) == 0
    await arrive(store, TWO, WITHOUT_ID, NEXT_HOUR)
    assert await note_late(store) == 2
    assert await note_late(store) == 0
    assert await count_late(store, WINDOW.id) == 2
    three, two = await list_late(store)
    assert (three.trajectory_id, two.trajectory_id) == ("three", "two")
    assert {row.window_id for row in (two, three)} == {WINDOW.id}


async def test_whoever_wrote_in_time_but_committed_late_is_told_apart(store):
    await trained(store)
    early, written = "2025-11-14T09:59", datetime.now(UTC) + timedelta(hours=1)
    await arrive(
        store, {**TWO, "createdAt": early}, {**WITHOUT_ID, "createdAt": f"{written:%FT%T}"}
    )
    await note_late(store)
    reasons = {row.trajectory_id: row.reason for row in await list_late(store)}
    assert reasons == {"two": "committed late", "three": "written late"}


async def test_rows_that_were_collected_and_left_unused_are_not_late(store):
    await insert_trajectories(store, ONE, TWO)
    held = await claim(store)
    await store_collected(store, held, ["one", "two"])
    await set_state(store, held, WindowState.TRAINED)
    assert await note_late(store) == 0


@pytest.mark.parametrize("kind", ["agent", "trajectory"])
async def test_play_that_was_taken_down_is_neither_collected_nor_late(store, settings, kind):
    await insert(store, "users", [{**real_rows("users")[0], "id": "ann", "username": "ann"}])
    await insert_trajectories(store, ONE, {**TWO, "agentId": "ann"})
    await withhold(store, kind, "two" if kind == "trajectory" else "ann", "asked for")
    held = await claim(store)
    assert (await collect_window(store, settings.home, held, WINDOW)).artifact.rows == 1
    await store_collected(store, held, ["one"])
    await set_state(store, held, WindowState.TRAINED)
    assert await note_late(store) == 0


@pytest.mark.parametrize("state", sorted(set(WindowState) - FINISHED))
async def test_before_a_window_is_trained_nothing_is_late(store, state):
    if state in (WindowState.OPEN, WindowState.CLOSING):
        return  # never stored
    await store_collected(store, await claim(store), [])
    await store.pool.execute("UPDATE babylon.windows SET state = $1", state)
    await insert_trajectories(store, ONE)
    assert await note_late(store) == 0


async def test_only_the_recipe_that_admitted_a_late_row_collects_it(store, settings):
    await trained(store)
    await arrive(store, TWO)
    await note_late(store)
    await set_state(store, await claim(store), WindowState.REJECTED)
    again = Window(WINDOW.start, recipe="again")
    held = await claim_window(store, again, owner="test", lease_s=60)
    assert (await collect_window(store, settings.home, held, again)).artifact.rows == 0
    assert await admit_late(store, held, again) == 1
    assert (await collect_window(store, settings.home, held, again)).artifact.rows == 1
    assert await count_late(store, WINDOW.id) == 0
    (row,) = await list_late(store)
    assert row.admitted_to == "2025-11-14T09:00+again"


async def test_a_stale_claim_neither_collects_nor_admits(store):
    stale = await claim(store)
    await store_collected(store, await claim(store), ["one"])
    for write in (store_collected(store, stale, ["two"]), admit_late(store, stale, WINDOW)):
        with pytest.raises(FencedError):
            await write
    assert await store.pool.fetchval("SELECT trajectory_id FROM babylon.collected") == "one"


async def test_a_collection_replaces_the_one_before(store):
    held = await claim(store)
    await store_collected(store, held, ["one", "two"])
    await set_state(store, held, WindowState.CLAIMED)
    await store_collected(store, held, ["two", "three"])
    rows = await store.pool.fetch("SELECT trajectory_id FROM babylon.collected ORDER BY 1")
    assert [row[0] for row in rows] == ["three", "two"]
    row = await get_window(store, WINDOW.id)
    assert row.state == WindowState.COLLECTED


@pytest.mark.parametrize("query", [late._PLAYED_HERE, late._PLAYED_ELSEWHERE])
async def test_a_row_is_compared_with_no_other_window_than_its_own(store, query):
    """With 260,000 rows and 2,160 windows, each with each took minutes."""
    windows, each = 200, 5
    start = datetime(2025, 1, 1)
    await store.pool.execute("INSERT INTO \"User\" (id) VALUES ('a')")
    await store.pool.execute(_MANY, start, windows, each)
    await store.pool.execute("ANALYZE trajectories")
    ids = [f"{start + timedelta(hours=n):%Y-%m-%dT%H:%M}" for n in range(windows)]
    plan = await store.pool.fetchval(
        f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {query}", ids, [60] * windows, None, None
    )
    (found,) = json.loads(plan)
    assert found["Plan"]["Actual Rows"] == windows * each
    assert most_rows(found["Plan"]) <= 2 * windows * each


def most_rows(node):
    """The rows of the node of a plan that made most."""
    own = node["Actual Rows"] * node["Actual Loops"]
    return max([own, *map(most_rows, node.get("Plans", ()))])


_MANY = """
INSERT INTO trajectories (id, "trajectoryId", "agentId", "startTime", "endTime", "durationMs",
    "windowId", "stepsJson", "rewardComponentsJson", "metricsJson", "metadataJson", "totalReward",
    "episodeLength", "finalStatus", "updatedAt", "createdAt")
SELECT name, name, 'a', start, start, 1, NULL, '[]', '{}', '{}', '{}', 0, 1, 'done', start, start
FROM generate_series(0, $2::int - 1) AS hour, generate_series(1, $3::int) AS number,
    LATERAL (SELECT hour || '-' || number AS name,
                    $1::timestamp + make_interval(hours => hour, mins => number) AS start) AS played
"""


async def test_a_window_waits_for_a_transaction_that_wrote_in_time(store, settings):
    last = window_at((await read_clock(store)).now, 15).previous()
    connection = await asyncpg.connect(settings.database.url.get_secret_value())
    try:
        reading = connection.transaction()
        await reading.start()
        await connection.fetch("SELECT FROM trajectories")
        assert (await read_clock(store)).oldest_writer is None  # it cannot add rows
        await connection.execute(WRITE)
        clock = await read_clock(store)
        assert clock.oldest_writer is not None and clock.oldest_writer < clock.now
        grace_s = (clock.now - last.end).total_seconds()  # settled right now
        with pytest.raises(WindowNotReadyError, match="a transaction that wrote rows is open"):
            await claim_window(store, last, owner="w", lease_s=60, grace_s=grace_s)
        assert await get_window(store, last.id) is None
        await reading.commit()
    finally:
        await connection.close()
    await claim_window(store, last, owner="w", lease_s=60, grace_s=grace_s)


async def test_a_window_is_claimed_by_the_databases_clock_and_not_before_its_grace(store):
    now = (await read_clock(store)).now
    current, last = window_at(now + timedelta(seconds=30), 15), window_at(now, 15).previous()
    with pytest.raises(WindowNotReadyError, match="is open: the window is not over"):
        await claim_window(store, current, owner="w", lease_s=60)
    with pytest.raises(WindowNotReadyError, match="is closing: rows may still arrive"):
        await claim_window(store, last, owner="w", lease_s=60, grace_s=24 * 3600)
    await claim_window(store, last, owner="w", lease_s=60)


async def test_an_account_that_may_not_see_others_knows_that_it_does_not(store, settings):
    url = settings.database.url.get_secret_value()
    await store.pool.execute("CREATE ROLE viewer LOGIN PASSWORD 'viewer'")
    try:
        connection = await asyncpg.connect("postgresql://viewer:viewer@" + url.split("@")[1])
        try:
            async with store.pool.acquire() as writer, writer.transaction():
                await writer.execute(WRITE)
                clock = await clock_of(connection)
                assert clock.oldest_writer is None and clock.hidden >= 1
                await store.pool.execute("GRANT pg_read_all_stats TO viewer")
                await asyncio.sleep(0)
                clock = await clock_of(connection)
                assert clock.oldest_writer is not None and clock.hidden == 0
        finally:
            await connection.close()
    finally:
        await store.pool.execute("DROP ROLE viewer")

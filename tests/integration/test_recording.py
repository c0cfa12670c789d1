"""From a request to a row, over full disks, dead gateways and rows that Postgres refuses."""

import asyncio
import errno
import math
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import asyncpg
import httpx
import msgspec
import openai
import pytest

from babylon.core.home import Home
from babylon.core.settings import RecordingPolicy, Settings
from babylon.serving.gateway import follower, recording, segments, shipping
from babylon.serving.gateway.handover import Handover
from babylon.serving.gateway.recording import CallRecorder
from babylon.serving.gateway.segments import Segment, abandoned, encode_record, framed
from babylon.serving.gateway.shipping import Shipper
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.calls import CALL_COLUMNS, RecordedCall, insert_calls
from benchmarks.gateway.upstream import Upstream
from tests.integration.canned_gateway import HELLO, Canned, canned_gateway
from tests.unit.serving.gateway.calls import call

ASKED = {"model": "babylon", "messages": HELLO}


async def ids(store: Store) -> list[str]:
    rows = await store.pool.fetch("SELECT call_id FROM babylon.calls ORDER BY call_id")
    return [row["call_id"] for row in rows]


def left_behind(directory: Path, *numbers: int, torn: int = 0) -> None:
    """A segment of a gateway that died."""
    segment = Segment.create(directory)
    segment.append([encode_record(call(number)) for number in numbers])
    segment.close()
    with segment.path.open("r+b") as file:
        file.seek(segment.durable)
        file.write(encode_record(call(99))[:torn])


async def ship_all(store: Store, directory: Path) -> Shipper:
    shipper = Shipper(store, directory)
    await shipper.ship()
    return shipper


async def test_what_dead_gateways_left_is_stored_once(store: Store, tmp_path: Path) -> None:
    left_behind(tmp_path, 1, 2, torn=30)
    left_behind(tmp_path, 2, 3)
    await ship_all(store, tmp_path)
    assert await ids(store) == ["c1", "c2", "c3"]
    assert not list(tmp_path.iterdir())


async def test_what_copy_writes_is_what_insert_writes(store: Store) -> None:
    text = "tab\t line\n return\r back\\slash \\N \\. quote'\" é {1,2} \N{SNOWMAN}"
    plain = call(1, response=text, messages=text, agent_id=text, seed=-(2**63), step_number=None)
    odd = call(
        2, logprobs=[math.nan, -math.inf, -1e-30], prompt_token_ids=[], trainable=False, response=""
    )
    await insert_calls(store, [plain, odd])
    names, places = ", ".join(CALL_COLUMNS), [f"${n + 1}" for n in range(len(CALL_COLUMNS))]
    await store.pool.executemany(
        f"INSERT INTO babylon.calls ({names}) VALUES ({', '.join(places)})",
        [
            [getattr(one, name) for name in CALL_COLUMNS]
            for one in (replace(plain, call_id="c3"), replace(odd, call_id="c4"))
        ],
    )
    rows = await store.pool.fetch(f"SELECT {names} FROM babylon.calls ORDER BY call_id")
    assert [str(tuple(row)[1:]) for row in rows[:2]] == [str(tuple(row)[1:]) for row in rows[2:]]
    assert RecordedCall(**rows[0]) == plain


async def test_a_refused_call_is_set_aside_alone(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment = Segment.create(tmp_path)
    wrong = encode_record(call(3, completion_token_ids=[2**40], response="secret"))
    unreadable = framed(b"c5\tsecret\n")
    good = [encode_record(call(number)) for number in (1, 2, 4)]
    segment.append([*good[:2], unreadable, wrong, good[2]])
    segment.close()
    await insert_calls(store, [call(2)])
    shipper = await ship_all(store, tmp_path)
    assert await ids(store) == ["c1", "c2", "c4"]
    assert shipper.idle
    assert (tmp_path / "refused").read_bytes() == unreadable + wrong
    assert "'c3' is not in the database" in caplog.text and "secret" not in caplog.text


async def test_segments_of_earlier_versions_are_shipped(store: Store, tmp_path: Path) -> None:
    """Their records are calls in MessagePack, of fewer columns."""
    old = call(1, response="tab\t", messages='[{"content": "\\n"}]')
    fields = {name: getattr(old, name) for name in CALL_COLUMNS[:21]}
    records = [framed(msgspec.msgpack.encode(one)) for one in (fields, {"secret": 1}, call(2))]
    data = b"".join(records)
    (tmp_path / "1-1.calls").write_bytes(data + bytes(5000))
    (tmp_path / "2-1.calls").write_bytes(data[:-4] + bytes(5000))
    left_behind(tmp_path, 2, 3)
    await ship_all(store, tmp_path)
    rows = await store.pool.fetch(f"SELECT {', '.join(CALL_COLUMNS)} FROM babylon.calls")
    assert sorted(row["call_id"] for row in rows) == ["c1", "c2", "c3"]
    assert old in [RecordedCall(**row) for row in rows]
    assert (tmp_path / "refused").read_bytes() == 2 * records[1]
    assert [path.name for path in tmp_path.iterdir()] == ["refused"]


async def test_segments_of_other_columns_are_shipped(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = framed("\t".join(reversed(CALL_COLUMNS[:21])).encode())
    monkeypatch.setattr(segments, "COLUMNS", columns)
    segment = Segment.create(tmp_path)
    line = encode_record(call(1))[8:].removesuffix(b"\n").split(b"\t")[:21]
    segment.append([framed(b"\t".join(reversed(line)) + b"\n")])
    segment.close()
    monkeypatch.undo()
    await insert_calls(store, [call(2)])
    left_behind(tmp_path, 2)
    await ship_all(store, tmp_path)
    rows = await store.pool.fetch(f"SELECT {', '.join(CALL_COLUMNS)} FROM babylon.calls")
    assert [RecordedCall(**row) for row in rows] == [call(2), call(1)]


async def test_a_segment_outlives_a_database_that_is_away(store: Store, tmp_path: Path) -> None:
    left_behind(tmp_path, 1, 2)
    await store.pool.execute("ALTER TABLE babylon.calls RENAME TO hidden")
    shipper = Shipper(store, tmp_path)
    assert not await shipper.close()
    assert shipper.shipped_until is None
    await store.pool.execute("ALTER TABLE babylon.hidden RENAME TO calls")
    (segment,) = abandoned(tmp_path)
    segment.close()
    await ship_all(store, tmp_path)
    assert await ids(store) == ["c1", "c2"]


async def test_a_closed_segment_of_a_host_that_died_is_shipped_from_the_object_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "LOOK_S", 0.0)
    dead, alive = (Home(tmp_path / name, f"file://{tmp_path}/bucket") for name in ("dead", "alive"))
    left_behind(dead.recording, 1, 2)
    left_behind(alive.recording, 2, 3)
    theirs, ours = Shipper(store, dead.recording), Shipper(store, alive.recording)
    await store.pool.execute("ALTER TABLE babylon.calls RENAME TO hidden")
    for shipper in (theirs, ours):
        with pytest.raises(asyncpg.UndefinedTableError):
            await shipper.ship()
    handover, other = Handover(dead, theirs), Handover(alive, ours)
    await handover.look()
    assert not list((tmp_path / "bucket").rglob("*.lines"))  # it may only be late
    await handover.look()
    await other.look()  # its own calls wait, too
    shutil.rmtree(dead.root)
    await store.pool.execute("ALTER TABLE babylon.hidden RENAME TO calls")
    await ours.ship()
    await other.look()
    await ours.ship()
    await other.look()
    assert await ids(store) == ["c1", "c2", "c3"]
    assert not list(tmp_path.rglob("*.lines"))


async def test_gaps_that_the_database_could_not_take_are_all_stored(
    store: Store, tmp_path: Path
) -> None:
    shipper = Shipper(store, tmp_path)
    recorder = CallRecorder(shipper, tmp_path, "available", "test")
    for number in range(3):
        recorder._settle([], "the disk is full")
        recorder._note_gap("the disk is full", f"c{number}")
        recorder._settle([], None)
    await store.pool.execute("ALTER TABLE babylon.recording_gaps RENAME TO hidden")
    with pytest.raises(asyncpg.UndefinedTableError):
        await shipper.ship()
    await store.pool.execute("ALTER TABLE babylon.hidden RENAME TO recording_gaps")
    recorder._settle([], "the disk is full")
    recorder._note_gap("the disk is full", "c3")
    await shipper.ship()
    assert shipper.idle
    recorder._note_gap("the disk is full", "c4")  # the gap goes on
    assert not shipper.idle
    await shipper.ship()
    rows = await store.pool.fetch(
        "SELECT calls, call_ids FROM babylon.recording_gaps ORDER BY began_at"
    )
    assert [(row["calls"], row["call_ids"]) for row in rows] == [
        *((1, [f"c{number}"]) for number in range(3)),
        (2, ["c3", "c4"]),
    ]
    await recorder.close()


async def test_a_disk_without_room_for_a_segment_takes_no_calls(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, probes, write = 2**20, [], os.pwrite

    def pwrite(descriptor: int, data: bytes, at: int) -> int:
        if at + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    def probe(directory: Path) -> None:
        probes.append(recorder.problem)
        segments.try_to_write(directory)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(recording, "PROBE_S", 0.01)
    monkeypatch.setattr(recording, "try_to_write", probe)
    recorder = CallRecorder(Shipper(store, tmp_path), tmp_path, "lossless", "test")
    running = asyncio.create_task(recorder.run())
    try:
        with pytest.raises(RequestError, match="takes no calls"):
            await recorder.record(call(1))
        async with asyncio.timeout(10):
            while len(probes) < 5:
                with pytest.raises(RequestError, match="No space left"):
                    recorder.admit("k1", None, "t")
                await asyncio.sleep(0.01)
            room = 2**23
            while recorder.problem:
                await asyncio.sleep(0.01)
        assert recorder.admit("k1", None, "t") and await recorder.record(call(2))
    finally:
        await recorder.close()
        await running
    assert await ids(store) == ["c2"]


@pytest.fixture
async def gateway(
    store: Store, settings: Settings, policy: RecordingPolicy, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Canned]:
    """Its recordings cannot be written: a file is where their directory must be."""
    monkeypatch.setattr(recording, "PROBE_S", 0.05)
    settings.home.root.mkdir()
    settings.home.recording.touch()
    chosen = settings.replace(serving={"recording": policy})
    async with canned_gateway(store, chosen, Upstream()) as gateway:
        yield gateway


async def until_it_records(gateway: Canned, client: openai.AsyncOpenAI) -> str:
    """Ask until an answer comes, and return the id of its call."""
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await client.chat.completions.with_raw_response.create(**ASKED)
            except openai.InternalServerError:
                await asyncio.sleep(0.02)
            else:
                return answer.headers["x-call-id"]


@pytest.mark.parametrize("policy", ["lossless"])
async def test_without_a_disk_no_answer_ends_well_and_then_it_goes_on(
    gateway: Canned, settings: Settings
) -> None:
    async with gateway.client() as client:
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="takes no calls") as caught:
                await client.chat.completions.create(**ASKED)
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"] == "1"
        settings.home.recording.unlink()
        call_id = await until_it_records(gateway, client)
    assert [row["call_id"] for row in await gateway.rows()] == [call_id]
    assert not await gateway.store.pool.fetch("SELECT * FROM babylon.recording_gaps")


@pytest.mark.parametrize("policy", ["available"])
async def test_without_a_disk_answers_may_go_unrecorded_and_the_gap_is_on_record(
    gateway: Canned, settings: Settings
) -> None:
    async with gateway.client() as client:
        ids = [(await client.chat.completions.create(**ASKED)).id for _ in range(3)]
        # The disk failed while the first call was answered, so its id does not say so.
        assert [one.startswith("unrecorded-") for one in ids] == [False, True, True]
        play = {"trajectory_id": "t"}
        step = {"type": "step", "number": 0, "calls": ids, **play}
        events = [{"type": "start", **play}, step, {"type": "finish", **play}]
        answer = await client.post("/events", body={"events": events}, cast_to=httpx.Response)
        assert answer.json()["results"][-1]["unrecorded"] == 3
        settings.home.recording.unlink()
        async with asyncio.timeout(60):
            while not await gateway.rows():
                await client.chat.completions.create(**ASKED)
    (gap,) = await gateway.store.pool.fetch("SELECT * FROM babylon.recording_gaps")
    assert gap["calls"] >= 3 and gap["began_at"] < gap["ended_at"]
    assert str(settings.home.recording) in gap["reason"]


@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_gateway_whose_clock_is_wrong_says_what_is_recorded_by_the_databases(
    store: Store, settings: Settings, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Wrong":
            return super().now(tz) + timedelta(hours=hours)

    for module in (recording, shipping, follower):
        monkeypatch.setattr(module, "datetime", Wrong, raising=False)
    async with canned_gateway(store, settings, Upstream()) as gateway, gateway.client() as client:
        await client.chat.completions.create(**ASKED)
        assert len(await gateway.rows()) == 1  # it waits until the call is recorded
        late = await store.pool.fetchval(
            "SELECT now() - recorded_until FROM babylon.gateways WHERE recorded_until <= now()"
        )
        assert late is not None and late < timedelta(hours=1)

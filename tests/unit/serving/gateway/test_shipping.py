"""Segments of dead gateways are taken over while calls are answered."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from babylon.serving.gateway import shipping
from babylon.serving.gateway.segments import Segment, encode_record
from babylon.serving.gateway.shipping import Shipper
from babylon.store import Store
from tests.unit.serving.gateway.calls import call


async def test_other_tasks_run_between_the_segments_of_a_dead_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a thousand of them takes half a minute."""
    for number in range(3):
        segment = Segment.create(tmp_path)
        segment.append([encode_record(call(number))])
        segment.close()
    turns = 0
    seen: list[int] = []
    shipped: list[bytes] = []
    take_over = Segment.take_over

    async def other_task() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def taken(path: Path) -> Segment | None:
        seen.append(turns)
        return take_over(path)

    async def stored(_: Store, columns: object, lines: bytes) -> None:
        shipped.append(lines.partition(b"\t")[0])

    monkeypatch.setattr(Segment, "take_over", taken)
    monkeypatch.setattr(shipping, "copy_lines", stored)
    other = asyncio.create_task(other_task())
    await asyncio.sleep(0)
    await Shipper(cast(Store, None), tmp_path).ship()
    other.cancel()
    assert seen[0] < seen[1] < seen[2]
    assert shipped == [b"c0", b"c1", b"c2"]  # the oldest first
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("turns", range(4))
async def test_it_stops_though_a_call_comes_at_that_moment(tmp_path: Path, turns: int) -> None:
    """A gateway waits for it before it ends."""
    shipper = Shipper(cast(Store, None), tmp_path)
    running = asyncio.create_task(shipper.run())
    await asyncio.sleep(0.01)
    shipper.wake()
    for _ in range(turns):  # of the event loop, until the waiting task goes on
        await asyncio.sleep(0)
    running.cancel()
    stopped, _ = await asyncio.wait([running], timeout=10)
    running.cancel()
    assert stopped

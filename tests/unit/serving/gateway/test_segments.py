import os
import resource
from pathlib import Path

import pytest

from babylon.serving.gateway.segments import (
    COLUMNS,
    DAMAGED,
    SEGMENT_BYTES,
    TORN,
    Segment,
    abandoned,
    encode_record,
)
from babylon.store.calls import CALL_COLUMNS
from tests.unit.serving.gateway.calls import call

CALLS = [call(number, response="x" * number) for number in range(20)]
RECORDS = [encode_record(one) for one in CALLS]


def end_of(count: int) -> int:
    """Where the record after the first ``count`` begins."""
    return len(COLUMNS) + sum(map(len, RECORDS[:count]))


def written(directory: Path) -> Path:
    """A segment with all records, whose process is gone."""
    segment = Segment.create(directory)
    segment.append(RECORDS[:7])
    segment.append(RECORDS[7:])
    segment.close()
    return segment.path


def read_all(segment: Segment, limit: int) -> tuple[list[bytes], str | None]:
    found: list[bytes] = []
    start, damage = segment.shipped, None
    while start < segment.durable and damage is None:
        portion = segment.read(start, limit)
        found += portion.records
        start, damage = portion.end, portion.damage
    return found, damage


@pytest.mark.parametrize("limit", [1, 300, 2**20])
def test_records_come_back_equal_in_portions_of_any_size(tmp_path: Path, limit: int) -> None:
    written(tmp_path)
    (segment,) = abandoned(tmp_path)
    assert read_all(segment, limit) == (RECORDS, None)
    segment.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [1, 5, len(RECORDS[-1]) - 1])
@pytest.mark.parametrize("zeros", [0, 5000])
def test_a_torn_last_record_costs_no_other(tmp_path: Path, cut: int, zeros: int) -> None:
    path = written(tmp_path)
    with path.open("r+b") as file:
        size = file.truncate(end_of(len(RECORDS)) - cut)
        file.truncate(size + zeros)
    (segment,) = abandoned(tmp_path)
    assert read_all(segment, 2**20) == (RECORDS[:-1], TORN)
    segment.close()


@pytest.mark.parametrize("limit", [400, 2**20])
def test_a_flipped_bit_is_no_torn_end_and_the_file_is_kept(tmp_path: Path, limit: int) -> None:
    path = written(tmp_path)
    at = end_of(10) + 20
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    (segment,) = abandoned(tmp_path)
    assert read_all(segment, limit) == (RECORDS[:10], DAMAGED)
    assert segment.set_aside().exists()
    assert not [*abandoned(tmp_path)]


def test_a_segment_of_a_living_process_is_nobody_elses(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path)
    segment.append(RECORDS)
    assert not [*abandoned(tmp_path)]
    segment.close()
    (taken,) = abandoned(tmp_path)
    assert not [*abandoned(tmp_path)]
    taken.remove()


def test_records_that_do_not_fit_on_the_disk_leave_the_segment_as_it_was(tmp_path: Path) -> None:

    segment = Segment.create(tmp_path)
    segment.append(RECORDS[:3])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (segment.durable + 50, hard))
    try:
        with pytest.raises(OSError):
            segment.append(RECORDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_all(segment, 2**20) == (RECORDS[:3], None)
    segment.append(RECORDS[3:])
    assert read_all(segment, 2**20) == (RECORDS, None)
    segment.remove()


def test_a_segment_without_a_record_is_empty(tmp_path: Path) -> None:
    Segment.create(tmp_path).close()
    (segment,) = abandoned(tmp_path)
    assert segment.shipped == segment.durable and segment.columns == CALL_COLUMNS
    assert segment.path.stat().st_size == SEGMENT_BYTES
    segment.remove()


def test_a_file_that_was_never_finished_is_removed_once_it_is_old(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / f"{name}.part").touch()
    os.utime(tmp_path / "old.part", (0, 0))
    assert not [*abandoned(tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == ["new.part"]


def test_a_page_that_the_disk_lost_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("r+b") as file:
        file.seek(end_of(5))
        file.write(bytes(sum(map(len, RECORDS[5:12]))))
    (segment,) = abandoned(tmp_path)
    assert read_all(segment, 2**20) == (RECORDS[:5], DAMAGED)
    segment.close()

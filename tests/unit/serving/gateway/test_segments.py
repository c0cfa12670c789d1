from pathlib import Path

import pytest

from babylon.serving.gateway.segments import DAMAGED, TORN, Segment, abandoned, encode_record
from tests.unit.serving.gateway.calls import call

CALLS = [call(number, response="x" * number) for number in range(20)]
RECORDS = [encode_record(one) for one in CALLS]


def written(directory: Path) -> Path:
    """A segment with all records, whose process is gone."""
    segment = Segment.create(directory)
    segment.append(RECORDS[:7])
    segment.append(RECORDS[7:])
    segment.close()
    return segment.path


def read_all(segment: Segment, limit: int) -> tuple[list[object], str | None]:
    found: list[object] = []
    start, damage = 0, None
    while start < segment.durable and damage is None:
        portion = segment.read(start, limit)
        found += portion.calls
        start, damage = portion.end, portion.damage
    return found, damage


@pytest.mark.parametrize("limit", [1, 300, 2**20])
def test_records_come_back_equal_in_portions_of_any_size(tmp_path: Path, limit: int) -> None:
    written(tmp_path)
    (segment,) = abandoned(tmp_path)
    assert read_all(segment, limit) == (CALLS, None)
    segment.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [1, 5, len(RECORDS[-1]) - 1])
def test_a_torn_last_record_costs_no_other(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    (segment,) = abandoned(tmp_path)
    assert read_all(segment, 2**20) == (CALLS[:-1], TORN)
    segment.close()


@pytest.mark.parametrize("limit", [400, 2**20])
def test_a_flipped_bit_is_no_torn_end_and_the_file_is_kept(tmp_path: Path, limit: int) -> None:
    path = written(tmp_path)
    at = sum(map(len, RECORDS[:10])) + 20
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    (segment,) = abandoned(tmp_path)
    assert read_all(segment, limit) == (CALLS[:10], DAMAGED)
    assert segment.set_aside().exists()
    assert not abandoned(tmp_path)


def test_a_segment_of_a_living_process_is_nobody_elses(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path)
    segment.append(RECORDS)
    assert not abandoned(tmp_path)
    segment.close()
    (taken,) = abandoned(tmp_path)
    assert not abandoned(tmp_path)
    taken.remove()


def test_records_that_do_not_fit_on_the_disk_leave_the_segment_as_it_was(tmp_path: Path) -> None:
    import resource

    segment = Segment.create(tmp_path)
    segment.append(RECORDS[:3])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (segment.durable + 50, hard))
    try:
        with pytest.raises(OSError):
            segment.append(RECORDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_all(segment, 2**20) == (CALLS[:3], None)
    segment.append(RECORDS[3:])
    assert read_all(segment, 2**20) == (CALLS, None)
    segment.remove()

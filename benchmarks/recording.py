"""Segments beside SQLite: cost of making recorded calls durable, reading them, and forgetting them.

    python -m benchmarks.recording [--calls 4096] [--turns 3]

Both take the same encoded calls (``encode_record``) in turns, in groups of 1, 8 and 64, each group
durable before the next. Segments are the gateway's: files of zeros, in which a group is one O_DSYNC
write, read back, and removed. Their making counts, which the gateway does in the background. SQLite
has a table of blobs in WAL mode with ``synchronous=FULL``, which syncs the log at each commit
(https://www.sqlite.org/pragma.html#pragma_synchronous); a group is one transaction, its rows are
read back and deleted. Prints processor time of a call, the median time of a group, and the bytes
given to the disk for each byte of a call.
"""

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from babylon.serving.gateway.segments import SEGMENT_BYTES, Segment, encode_record
from babylon.serving.gateway.shipping import PORTION_BYTES
from babylon.store.calls import RecordedCall

GROUPS = (1, 8, 64)
Way = Callable[[Path, list[list[bytes]]], Iterator[None]]
CALL = RecordedCall(
    call_id="0" * 32,
    agent_id="agent-1",
    trajectory_id="trajectory-1",
    step_number=1,
    policy_version=3,
    route_version=3,
    model="babylon-v3",
    messages='[{"role":"user","content":"' + "You trade prediction markets. " * 30 + '"}]',
    response="word " * 16,
    prompt_token_ids=list(range(200)),
    completion_token_ids=list(range(1000, 1016)),
    logprobs=[-0.5 - number / 7 for number in range(16)],
    temperature=1.0,
    top_p=1.0,
    max_tokens=16,
    seed=None,
    finish_reason="stop",
    trainable=True,
    untrainable_reason=None,
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
    latency_ms=100,
    arm="champion",
)


def segments(directory: Path, groups: list[list[bytes]]) -> Iterator[None]:
    """Write segments, with a pause after each group; then read and remove them."""
    made = [Segment.create(directory)]
    for group in groups:
        if made[-1].durable >= SEGMENT_BYTES:
            made.append(Segment.create(directory))
        made[-1].append(group)
        yield
    read = 0
    for segment in made:
        start = segment.shipped
        while start < segment.durable:
            portion = segment.read(start, PORTION_BYTES)
            start, read = portion.end, read + len(portion.records)
        segment.remove()
    assert read == sum(map(len, groups))


def sqlite(directory: Path, groups: list[list[bytes]]) -> Iterator[None]:
    """Commit to a table, with a pause after each group; then read and delete the rows."""
    database = sqlite3.connect(directory / "calls.db", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE IF NOT EXISTS calls (id INTEGER PRIMARY KEY, record BLOB)")
    for group in groups:
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT INTO calls (record) VALUES (?)", [(one,) for one in group])
        database.execute("COMMIT")
        yield
    read = sum(1 for _ in database.execute("SELECT record FROM calls"))
    assert read == sum(map(len, groups))
    database.execute("DELETE FROM calls")
    database.close()


def written() -> int:
    """Return the bytes that this process has caused to be written to the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def measure(way: Way, directory: Path, groups: list[list[bytes]]) -> tuple[float, float, float]:
    """Return CPU-ms of a call, the median ms of a group, and bytes written for each byte."""
    calls, size = sum(map(len, groups)), sum(len(one) for group in groups for one in group)
    bytes_before, cpu, waits = written(), time.process_time(), list[float]()
    begun = time.perf_counter()
    for _ in way(directory, groups):
        waits.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    cost = 1000 * (time.process_time() - cpu) / calls
    return cost, 1000 * median(waits), (written() - bytes_before) / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    ways: dict[str, Way] = {"segments": segments, "SQLite": sqlite}
    print("| calls of | group | way | CPU-ms a call | ms a group | bytes written |")
    print("| --- | ---: | --- | ---: | ---: | ---: |")
    long = replace(CALL, messages=CALL.messages * 30, prompt_token_ids=list(range(6000)))
    for name, call in (("200 tokens", CALL), ("6,000 tokens", long)):
        record, calls = encode_record(call), options.calls if call is CALL else options.calls // 8
        for size in GROUPS:
            groups = [[record] * size for _ in range(calls // size)]
            found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
            for _ in range(options.turns):
                for kind, way in ways.items():
                    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
                        found[kind].append(measure(way, Path(directory), groups))
            for kind, turns in found.items():
                cost, wait, share = (median(column) for column in zip(*turns, strict=True))
                print(f"| {name} | {size} | {kind} | {cost:.3f} | {wait:.2f} | {share:.2f} |")


if __name__ == "__main__":
    main()

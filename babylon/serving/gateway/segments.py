"""Append-only files of recorded calls, which keep them until they are in the database.

A record is eight bytes (length and CRC-32, little-endian) and a line of COPY's text format, which
goes to the database as it is. The first record names the columns of these lines: a later version
may have others. A file is full of zeros before the records: a synchronous write that neither
extends a file nor allocates blocks costs half, because it changes no metadata, and it does not wait
for the filesystem's journal, in which other programs' writes may stand before.

A segment belongs to the process that holds its lock. The kernel releases the lock of a process that
dies, and the next gateway takes over the segment. All functions here block.
"""

import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from babylon.core.home import sync
from babylon.serving.gateway import earlier_segments
from babylon.store.calls import CALL_COLUMNS, RecordedCall, copy_line

log = logging.getLogger(__name__)

SUFFIX, PART = ".lines", ".part"
SUFFIXES = (SUFFIX, earlier_segments.SUFFIX)
UNFINISHED_S = 60.0  # since the last write to a file that is still being made
SEGMENT_BYTES = 2**22  # the most that is read again after a crash
ZEROS = bytes(2**18)  # written at once: records of another segment may wait for the disk meanwhile
MAX_RECORD_BYTES = 2**28
TORN, DAMAGED = "torn", "damaged"
_HEAD = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSlice:
    """Whole records of a segment up to the offset ``end``, as they are in the file.

    ``damage`` tells what follows, if no whole record does: ``TORN`` is the beginning of a record
    that was being written when its process ended, ``DAMAGED`` is anything else.
    """

    records: list[bytes]
    end: int
    damage: str | None = None


def encode_record(call: RecordedCall) -> bytes:
    return framed(copy_line(call))


def framed(body: bytes) -> bytes:
    return _HEAD.pack(len(body), crc32(body)) + body


COLUMNS = framed("\t".join(CALL_COLUMNS).encode())
"""The first record."""


class Segment:
    """One locked file.

    ``durable``: bytes that survive a power cut. ``shipped``: bytes whose calls are in the database.
    ``sealed``: nothing more is written. ``columns``: of the table ``calls``, which its lines have.
    """

    def __init__(self, path: Path, descriptor: int, written: bytes, *, sealed: bool) -> None:
        self.path, self.durable, self.sealed = path, len(written), sealed
        self.shipped, self.columns = 0, CALL_COLUMNS
        self._descriptor = descriptor
        first = next(_records(written), None)
        if first and path.suffix == SUFFIX:
            self.shipped = len(first)
            self.columns = tuple(first[_HEAD.size :].decode().split("\t"))

    @classmethod
    def create(cls, directory: Path) -> "Segment":
        """Create and lock a file. It gets its name after that, so no other process takes it over.

        Raises:
            OSError: the disk is full or not writable.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{time.time_ns()}-{os.getpid()}{SUFFIX}"
        part = path.with_suffix(PART)
        # O_DSYNC makes each write durable when it returns. With a separate sync, the writing
        # thread would wait for the interpreter lock a second time.
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DSYNC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for start in range(0, SEGMENT_BYTES, len(ZEROS)):
                os.pwrite(descriptor, ZEROS, start)
            os.pwrite(descriptor, COLUMNS, 0)
            part.rename(path)
            sync(directory)
        except OSError:  # a full disk does not stay full of a file that nobody uses
            part.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return cls(path, descriptor, COLUMNS, sealed=False)

    @classmethod
    def take_over(cls, path: Path) -> "Segment | None":
        """Lock the file of a process that has ended; ``None`` if another process holds it."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = path.exists()  # its owner may have removed it after we opened it
        except BlockingIOError:
            ours = False
        if not ours:
            os.close(descriptor)
            return None
        return cls(path, descriptor, path.read_bytes().rstrip(b"\0"), sealed=True)

    def append(self, records: Sequence[bytes]) -> None:
        """Write records. On return all of them are durable; after an error none is in the file.

        Raises:
            OSError: the disk is full or broken.
        """
        data = b"".join(records)
        try:
            written = 0
            while written < len(data):
                rest = data[written:] if written else data
                written += os.pwrite(self._descriptor, rest, self.durable + written)
        except OSError:
            os.ftruncate(self._descriptor, self.durable)
            raise
        self.durable += len(data)

    def read(self, start: int, limit: int) -> SegmentSlice:
        """Read whole records from ``start`` on, at most ``limit`` bytes but at least one record."""
        limit = max(limit, _HEAD.size)
        data = os.pread(self._descriptor, min(limit, self.durable - start), start)
        if len(data) >= _HEAD.size and start + len(data) < self.durable:
            needed = _HEAD.size + _HEAD.unpack_from(data)[0]
            if needed > len(data):  # the record is larger than the limit
                data = os.pread(self._descriptor, min(needed, self.durable - start), start)
        found = list(_records(data))
        end = sum(map(len, found))
        at_the_end = start + len(data) >= self.durable
        damage = _damage(data[end:]) if at_the_end or not found else None
        return SegmentSlice(records=found, end=start + end, damage=damage)

    def line(self, record: bytes) -> bytes:
        """Return a record as a line of COPY's text format with the columns of this segment."""
        body = record[_HEAD.size :]
        return earlier_segments.line(body) if self.path.suffix == earlier_segments.SUFFIX else body

    def close(self) -> None:
        os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the file: all its calls are in the database."""
        self.path.unlink()
        os.close(self._descriptor)

    def set_aside(self) -> Path:
        """Rename an unreadable file, so that it is kept but not read again; return its path."""
        kept = self.path.with_suffix(".damaged")
        self.path.rename(kept)
        os.close(self._descriptor)
        return kept


def abandoned(directory: Path) -> Iterator[Segment]:
    """Take over the segments whose processes have ended, the oldest first, one at a time."""
    for path in directory.glob(f"*{PART}"):  # of a process that ended while it made the file
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink()
    paths = sorted(path for suffix in SUFFIXES for path in directory.glob(f"*{suffix}"))
    yield from filter(None, map(Segment.take_over, paths))


def keep_refused(directory: Path, record: bytes, call_id: str, why: str) -> None:
    """Add a record that the database refuses to the file ``refused``, which nobody deletes."""
    path = directory / "refused"
    with path.open("ab") as file:
        file.write(record)
    log.error("the call %r is not in the database (%s): it is kept in %s", call_id, why, path)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records up to the first one that is not whole."""
    offset = 0
    while offset + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, offset)
        record = data[offset : offset + _HEAD.size + length]
        body = memoryview(record)[_HEAD.size :]
        if len(body) < length or not length or crc32(body) != checksum:
            return
        offset += len(record)
        yield record


def _damage(rest: bytes) -> str | None:
    """Classify the bytes after the last whole record of a file."""
    if not rest:
        return None
    if len(rest) < _HEAD.size:
        return TORN
    length = _HEAD.unpack_from(rest)[0]
    return TORN if len(rest) < _HEAD.size + length < MAX_RECORD_BYTES else DAMAGED


def try_to_write(directory: Path) -> None:
    """Write, sync and remove a file, or raise ``OSError``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"probe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)

"""Append-only files of recorded calls: what keeps an answered call while the database is away.

A record is eight bytes (its length and its CRC-32, little-endian) and a ``RecordedCall`` in
MessagePack. A segment belongs to the process that holds its lock; the kernel frees the lock of one
that died, so whoever starts next can take its segments over. No function here is asynchronous.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec

from babylon.store.calls import RecordedCall

SUFFIX = ".calls"
MAX_RECORD_BYTES = 2**28
TORN, DAMAGED = "torn", "damaged"
_HEAD = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordedCall)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSlice:
    """Records of a segment up to the offset ``end``.

    ``damage`` is what stands there instead of more: the beginning of a record that was being
    written when its process ended (``TORN``), or no record at all (``DAMAGED``).
    """

    calls: list[RecordedCall]
    end: int
    damage: str | None = None


def encode_record(call: RecordedCall) -> bytes:
    body = _encoder.encode(call)
    return _HEAD.pack(len(body), crc32(body)) + body


class Segment:
    """One file and its lock.

    ``durable``: bytes that a power cut leaves there. ``shipped``: those of them that the database
    has. ``sealed``: nothing more will be written.
    """

    def __init__(self, path: Path, descriptor: int, *, durable: int, sealed: bool) -> None:
        self.path, self.durable, self.sealed = path, durable, sealed
        self.shipped = 0
        self._descriptor = descriptor

    @classmethod
    def create(cls, directory: Path) -> "Segment":
        """A new file, which gets its name when it is locked: nobody else finds it before.

        What is written to it is durable when the write returns (``O_DSYNC``): with a sync of its
        own the writing thread would wait a second time for the interpreter.

        Raises:
            OSError: the disk is full or closed to us.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{time.time_ns()}-{os.getpid()}{SUFFIX}"
        part = path.with_suffix(".part")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_DSYNC
        descriptor = os.open(part, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        part.rename(path)
        _sync_directory(directory)
        return cls(path, descriptor, durable=0, sealed=False)

    @classmethod
    def take_over(cls, path: Path) -> "Segment | None":
        """Another process's file, if that process is gone and nobody else was quicker."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if not path.exists():  # its owner removed it while we waited
            os.close(descriptor)
            return None
        return cls(path, descriptor, durable=os.fstat(descriptor).st_size, sealed=True)

    def append(self, records: Sequence[bytes]) -> None:
        """All of them are durable on return, or none is there.

        Raises:
            OSError: the disk is full or broken.
        """
        data = b"".join(records)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:] if written else data)
        except OSError:
            os.ftruncate(self._descriptor, self.durable)
            raise
        self.durable += len(data)

    def read(self, start: int, limit: int) -> SegmentSlice:
        """Records from ``start`` on, until ``limit`` bytes are exceeded or no more are durable."""
        limit = max(limit, _HEAD.size)
        data = os.pread(self._descriptor, min(limit, self.durable - start), start)
        if len(data) >= _HEAD.size and start + len(data) < self.durable:
            needed = _HEAD.size + _HEAD.unpack_from(data)[0]
            if needed > len(data):  # one record that is larger than the limit
                data = os.pread(self._descriptor, min(needed, self.durable - start), start)
        found = list(_records(data))
        end = found[-1][1] if found else 0
        at_the_end = start + len(data) >= self.durable
        damage = _damage(data[end:]) if at_the_end or not found else None
        calls = [call for call, _ in found]
        return SegmentSlice(calls=calls, end=start + end, damage=damage)

    def close(self) -> None:
        os.close(self._descriptor)

    def remove(self) -> None:
        """Everything in it is in the database."""
        self.path.unlink()
        os.close(self._descriptor)

    def set_aside(self) -> Path:
        """Keep what cannot be read for a person to look at, and never read it again."""
        kept = self.path.with_suffix(".damaged")
        self.path.rename(kept)
        os.close(self._descriptor)
        return kept


def abandoned(directory: Path) -> list[Segment]:
    """Segments whose processes are gone, the oldest first; they are ours now."""
    found = (Segment.take_over(path) for path in sorted(directory.glob(f"*{SUFFIX}")))
    return [segment for segment in found if segment]


def _records(data: bytes) -> Iterator[tuple[RecordedCall, int]]:
    """(record, offset behind it) as long as they are whole."""
    offset = 0
    while offset + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, offset)
        body = data[offset + _HEAD.size : offset + _HEAD.size + length]
        if len(body) < length or not length or crc32(body) != checksum:
            return
        offset += _HEAD.size + length
        yield _decoder.decode(body), offset


def _damage(rest: bytes) -> str | None:
    """What is wrong with bytes that are no record, up to the end of the file."""
    if not rest:
        return None
    if len(rest) < _HEAD.size:
        return TORN
    length = _HEAD.unpack_from(rest)[0]
    return TORN if len(rest) < _HEAD.size + length < MAX_RECORD_BYTES else DAMAGED


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

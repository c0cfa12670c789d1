"""Artifacts: the Parquet files that stages hand on, named by their content and never changed.

A file is written under a temporary name, synced, hashed and renamed, so that readers never see a
partial file. The same rows give the same bytes and so the same name; a repeated stage replaces its
file by an equal one. Reading verifies the hash first. Rows are streamed, so that a window need not
fit in memory. Other machines get the file through the object store (``babylon.core.objects``).
"""

import asyncio
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from babylon.core.errors import ArtifactError
from babylon.core.failpoints import failpoint
from babylon.core.home import Home, make_home
from babylon.core.objects import fetch, publish
from babylon.core.types import SCHEMA_VERSION, Artifact

Columns = dict[str, Sequence[Any] | pa.Array]  # name → values, all of one length
DIGEST_CHARS = 8
_ROWS_AT_A_TIME = 100
_OLDEST = pl.CompatLevel.oldest()
# Texts that differ in every row; a dictionary encoding would cost time and save nothing.
_LARGE = frozenset({"steps_json", "logs_json", "gateway_json", "calls_json", "game_json"})


class ArtifactWriter:
    """Writes one artifact: ``with ArtifactWriter(...) as writer: writer.write(frame)``.

    After the block ``writer.artifact`` is the manifest of ``<window>-<stage>-<digest>.parquet`` in
    the home's ``artifacts``. When the block raises, no file is left.
    A thread compresses rows while the caller makes the next ones; the next call raises its errors.
    With ``async with`` the file is also closed and hashed in a thread.
    """

    artifact: Artifact

    def __init__(
        self,
        home: Home,
        schema: pl.Schema,
        *,
        window_id: str,
        stage: str = "",
    ) -> None:
        make_home(home.root)
        home.artifacts.mkdir(parents=True, exist_ok=True)
        self._home = home
        self._window_id = window_id
        self._stem = "-".join(filter(None, (window_id.replace(":", "-"), stage)))
        self._schema = _arrow_schema(schema)
        self._rows = 0
        self._lock = threading.Lock()  # a cancelled caller leaves while its write still runs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parquet")
        self._behind: Future[None] | None = None
        self._path = home.artifacts / f".{self._stem}-{uuid.uuid4().hex}.tmp"
        self._parquet = pq.ParquetWriter(
            self._path,
            self._schema,
            compression="zstd",
            compression_level=1,  # level 3 takes twice as long and makes JSON no smaller
            use_dictionary=[name for name in schema if name not in _LARGE],
        )
        failpoint("artifact.opened")

    def write(self, rows: pl.DataFrame | Columns) -> None:
        """Append one row group with the schema's columns, in any order."""
        with self._lock, _named(self._path):
            if isinstance(rows, pl.DataFrame):
                table = rows.select(self._schema.names).to_arrow(compat_level=_OLDEST)
            else:
                table = pa.Table.from_pydict(rows, schema=self._schema)
            self._catch_up()
            self._behind = self._thread.submit(self._parquet.write_table, table)
            self._rows += len(table)

    def _catch_up(self) -> None:
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def __enter__(self) -> "ArtifactWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            with self._lock, _named(self._path):
                try:
                    self._catch_up()
                finally:
                    self._thread.shutdown()
                    self._parquet.close()
            if error is None:
                self.artifact = self._publish()
        finally:
            self._path.unlink(missing_ok=True)

    async def __aenter__(self) -> "ArtifactWriter":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        leave = asyncio.ensure_future(asyncio.to_thread(self.__exit__, kind, error, tb))
        try:
            await asyncio.shield(leave)
        finally:
            await asyncio.wait([leave])  # a cancelled caller closes the file too

    def _publish(self) -> Artifact:
        with self._path.open("rb") as written:
            os.fsync(written.fileno())
            sha256 = hashlib.file_digest(written, "sha256").hexdigest()
        name = f"{self._stem}-{sha256[:DIGEST_CHARS]}.parquet"
        failpoint("artifact.written")
        path = self._path.replace(self._path.with_name(name))
        publish(self._home, path)
        failpoint("artifact.published")
        return Artifact(
            uri=self._home.reference(path),
            sha256=sha256,
            rows=self._rows,
            window_id=self._window_id,
        )


def _arrow_schema(schema: pl.Schema) -> pa.Schema:
    return pl.DataFrame(schema=schema).to_arrow(compat_level=_OLDEST).schema


def write_artifact(
    home: Home,
    frame: pl.DataFrame,
    *,
    window_id: str,
    stage: str = "",
) -> Artifact:
    """Write one frame as an artifact."""
    with ArtifactWriter(home, frame.schema, window_id=window_id, stage=stage) as writer:
        for part in frame.iter_slices(_ROWS_AT_A_TIME):
            writer.write(part)
    return writer.artifact


def rewrite_artifact(
    home: Home,
    artifact: Artifact,
    change: Callable[[pl.DataFrame], pl.DataFrame],
    *,
    stage: str = "",
) -> Artifact:
    """Write a new artifact from ``change`` applied to each part of this one."""
    with _verified(home, artifact) as file:
        schema = change(_frame(file.schema_arrow.empty_table())).schema
        with ArtifactWriter(home, schema, window_id=artifact.window_id, stage=stage) as writer:
            for batch in _parts(file):
                writer.write(change(_frame(batch)))
    return writer.artifact


def read_artifact(
    home: Home, artifact: Artifact, columns: Sequence[str] | None = None
) -> pl.DataFrame:
    """Read all rows, of the given columns only.

    Raises:
        ArtifactError: the file is missing or was changed after it was written.
    """
    with _verified(home, artifact) as file:
        return _frame(file.read(columns=columns))


def iter_artifact(
    home: Home, artifact: Artifact, columns: Sequence[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Yield the rows in order, as frames of up to 100; a thread reads the next one meanwhile.

    No frame has more rows than were written at once.
    """
    return map(_frame, iter_batches(home, artifact, columns))


def iter_batches(
    home: Home, artifact: Artifact, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows as ``iter_artifact`` does, but as Arrow batches."""
    with _verified(home, artifact) as file, ThreadPoolExecutor(1) as ahead:
        batches = _parts(file, columns)
        following = ahead.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = ahead.submit(next, batches, None)
            yield batch


def remove_unfinished(directory: Path, older_than_s: float) -> None:
    """Delete temporary files that nobody has written to for ``older_than_s`` seconds."""
    for path in directory.rglob(".*.tmp"):
        with suppress(FileNotFoundError):  # finished or removed meanwhile
            if path.stat().st_mtime < time.time() - older_than_s:
                path.unlink()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to Arrow's errors, which do not name it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def _verified(home: Home, artifact: Artifact) -> Iterator[pq.ParquetFile]:
    path, remedy = Path(home.resolve(artifact.uri)), f"run window {artifact.window_id} again"
    if artifact.schema_version != SCHEMA_VERSION:
        raise ArtifactError(
            f"artifact {path} has schema version {artifact.schema_version}, this program reads"
            f" version {SCHEMA_VERSION}: {remedy}"
        )
    fetch(home, path, artifact.sha256)
    try:
        opened = path.open("rb")
    except FileNotFoundError as error:
        raise ArtifactError(f"artifact {path} is missing: {remedy}") from error
    with opened as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != artifact.sha256:
            raise ArtifactError(
                f"artifact {path} was changed after it was written: sha256 is {found[:16]}…,"
                f" expected {artifact.sha256[:16]}…: {remedy}"
            )
        file.seek(0)
        yield pq.ParquetFile(file, pre_buffer=False)  # otherwise the whole file stays in memory


def _parts(file: pq.ParquetFile, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    # One row group at a time: Arrow would join the small groups of large rows.
    for group in range(file.num_row_groups):
        yield from file.iter_batches(_ROWS_AT_A_TIME, [group], columns)


def _frame(table: object) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame

"""The files of a table: Parquet that any reader takes, named by window, split and content.

``trajectories/2025-11/2025-11-14T09-00-train-<digest>.parquet`` is the path in the local folder and
in the repository. The month is a column too, and the folder is not called ``month=``: readers that
add columns from paths would have it twice.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from babylon.core.artifacts import DIGEST_CHARS
from babylon.core.home import Home, make_home
from babylon.core.types import Published
from babylon.dataset.schema import SCHEMA_VERSION, SCHEMAS

SPLITS = ("train", "validation", "test")
UNREADABLE = (pa.ArrowException, OSError, KeyError, ValueError)
"""Errors of a file that is damaged, or no table."""
_SHARES = (90, 95, 100)  # percent of windows up to each split
_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")
_DICTIONARY_BYTES = 16 << 20  # prompts of a row group repeat; the default of 1 MB ends too early


def split_of(window_id: str) -> str:
    """Return the split of a window: that of its hour, because a game's outcomes are of whole hours.

    A recipe's window has that of its window.
    """
    hour = f"{window_id[: len('YYYY-MM-DDTHH')]}:00"
    percent = int.from_bytes(hashlib.sha256(hour.encode()).digest()[:8], "big") % 100
    return next(name for name, end in zip(SPLITS, _SHARES, strict=True) if percent < end)


@dataclass(frozen=True, slots=True)
class TableName:
    """The table and window of a file, and its folder in the dataset."""

    config: str
    window_id: str

    @property
    def month(self) -> str:
        return self.window_id[: len("YYYY-MM")]

    @property
    def folder(self) -> str:
        return f"{self.config}/{self.month}"

    @property
    def stem(self) -> str:
        return f"{self.window_id.replace(':', '-')}-{split_of(self.window_id)}"


def write_table(home: Home, name: TableName, portions: Iterable[list[dict[str, Any]]]) -> Published:
    """Write the rows, one row group a portion; earlier files of the same window are removed.

    A thread compresses a portion while the caller makes the next one.
    """
    schema = _with_common(SCHEMAS[name.config])
    common = {
        "month": name.month,
        "split": split_of(name.window_id),
        "schema_version": SCHEMA_VERSION,
    }
    make_home(home.root)
    (directory := home.datasets / name.folder).mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{name.stem}-{uuid.uuid4().hex}.tmp"
    rows = 0
    try:
        with _parquet(temporary, schema) as writer, ThreadPoolExecutor(1) as thread:
            behind: Future[None] | None = None
            for portion in portions:
                table = pa.Table.from_pylist([{**row, **common} for row in portion], schema=schema)
                if behind is not None:
                    behind.result()  # one portion at a time waits, whatever the window's size
                behind = thread.submit(writer.write_table, table)
                rows += len(portion)
            if behind is not None:
                behind.result()
        path, sha256 = _publish(temporary, name)
    finally:
        temporary.unlink(missing_ok=True)
    return Published(window_id=name.window_id, uri=home.reference(path), sha256=sha256, rows=rows)


def _with_common(schema: pa.Schema) -> pa.Schema:
    return schema.with_metadata({"schema_version": str(SCHEMA_VERSION)})


def _parquet(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    leaves = pq.ParquetFile(_empty(schema)).schema
    names = [leaves.column(index).path for index in range(len(leaves))]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in names if not any(ids in name for ids in _IDS)],
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        write_page_index=True,
    )


def _empty(schema: pa.Schema) -> pa.BufferReader:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    return pa.BufferReader(sink.getvalue())


def _publish(temporary: Path, name: TableName) -> tuple[Path, str]:
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
        sha256 = hashlib.file_digest(written, "sha256").hexdigest()
    final = temporary.with_name(f"{name.stem}-{sha256[:DIGEST_CHARS]}.parquet")
    temporary.replace(final)
    for other in temporary.parent.glob(f"{name.stem}-{'?' * DIGEST_CHARS}.parquet"):
        if other != final:
            other.unlink(missing_ok=True)
    return final, sha256


def is_whole(path: Path) -> bool:
    """Return True if the file is there with the content that its name tells."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stem.endswith(f"-{digest[:DIGEST_CHARS]}")


def ids_of(path: Path) -> list[dict[str, Any]]:
    """Return the ids of each row of a file of trajectories, with its players (since version 2)."""
    asked = ("trajectory_id", "agent_id", "scenario_id", "players")
    there = pq.read_schema(path).names
    rows: list[dict[str, Any]] = pq.read_table(
        path, columns=[name for name in asked if name in there]
    ).to_pylist()
    return rows


def rewrite_table(
    source: Path, target: Path, keep: Callable[[pa.Table], pa.Table]
) -> tuple[str, int]:
    """Write ``keep`` of each row group to ``target`` → (SHA-256, rows)."""
    file = pq.ParquetFile(source)
    rows = 0
    with _parquet(target, file.schema_arrow) as writer:
        for group in range(file.num_row_groups):
            table = keep(file.read_row_group(group))
            rows += len(table)
            if len(table):
                writer.write_table(table)
    with target.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest(), rows


def local_files(home: Home) -> list[tuple[str, Path]]:
    """Return the files of the local dataset by table and window."""
    return [
        (config, path)
        for config in SCHEMAS
        for path in sorted((home.datasets / config).glob("*/*.parquet"))
    ]


def read_published(home: Home, path: Path) -> Published:
    """Return what ``write_table`` returned of a file. One that is damaged raises ``UNREADABLE``."""
    window = path.stem[: -DIGEST_CHARS - 1].rpartition("-")[0]
    return Published(
        window_id=window[: len("YYYY-MM-DDThh")] + ":" + window[len("YYYY-MM-DDThh-") :],
        uri=home.reference(path),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        rows=pq.ParquetFile(path).metadata.num_rows,
    )

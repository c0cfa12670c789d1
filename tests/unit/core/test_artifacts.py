import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from urllib.request import url2pathname

import polars as pl
import pytest

from babylon.core.artifacts import (
    ArtifactWriter,
    iter_artifact,
    read_artifact,
    rewrite_artifact,
    write_artifact,
)
from babylon.core.errors import ArtifactError

WINDOW = "2025-11-14T09:00"
FRAME = pl.DataFrame({"id": [str(n) for n in range(450)], "value": [n / 7 for n in range(450)]})


def path_of(artifact):
    return Path(url2pathname(artifact.uri.removeprefix("file://")))


def test_the_same_rows_give_the_same_file_and_other_rows_another(tmp_path):
    first = write_artifact(FRAME, tmp_path / "a b", window_id=WINDOW, stage="scored")
    again = write_artifact(FRAME, tmp_path / "a b", window_id=WINDOW, stage="scored")
    other = write_artifact(FRAME.tail(-1), tmp_path / "a b", window_id=WINDOW, stage="scored")
    assert first == again
    assert other.sha256 != first.sha256
    assert path_of(first).name == f"2025-11-14T09-00-scored-{first.sha256[:8]}.parquet"
    assert len(list((tmp_path / "a b").iterdir())) == 2
    assert first.rows == 450
    assert read_artifact(first).equals(FRAME)


def test_rows_are_streamed_in_order_and_only_the_columns_asked_for(tmp_path):
    artifact = write_artifact(FRAME, tmp_path, window_id=WINDOW)
    parts = list(iter_artifact(artifact, ["id"]))
    assert len(parts) > 1
    assert pl.concat(parts).equals(FRAME.select("id"))


def test_rewriting_changes_every_part(tmp_path):
    artifact = write_artifact(FRAME, tmp_path, window_id=WINDOW)
    doubled = rewrite_artifact(
        artifact, tmp_path, lambda frame: frame.select("id", twice=pl.col("value") * 2), stage="x"
    )
    assert read_artifact(doubled).equals(FRAME.select("id", twice=pl.col("value") * 2))


def test_no_rows_keep_their_columns(tmp_path):
    artifact = write_artifact(FRAME.clear(), tmp_path, window_id=WINDOW)
    assert (artifact.rows, read_artifact(artifact).schema) == (0, FRAME.schema)


def test_a_failed_writer_leaves_nothing_behind(tmp_path):
    with (
        pytest.raises(RuntimeError),
        ArtifactWriter(tmp_path, FRAME.schema, window_id=WINDOW) as writer,
    ):
        writer.write(FRAME)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


async def test_a_cancelled_writer_ends_the_running_write_and_leaves_nothing(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    class SlowFrame(pl.DataFrame):
        def select(self, *columns):
            begun.set()
            go_on.wait(30)
            return super().select(*columns)

    async def cancelled_while_writing():
        async with ArtifactWriter(tmp_path, FRAME.schema, window_id=WINDOW) as writer:
            await asyncio.to_thread(writer.write, SlowFrame(FRAME))
            await asyncio.sleep(60)

    task = asyncio.create_task(cancelled_while_writing())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    leaving, _ = await asyncio.wait([task], timeout=0.2)
    go_on.set()
    assert not leaving
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []


def test_a_changed_missing_foreign_or_newer_file_is_refused_with_its_name(tmp_path):
    artifact = write_artifact(FRAME, tmp_path, window_id=WINDOW)
    path = path_of(artifact)
    with pytest.raises(ArtifactError, match="schema version 99"):
        read_artifact(replace(artifact, schema_version=99))
    with pytest.raises(ArtifactError, match="s3://bucket/x: only file://"):
        read_artifact(replace(artifact, uri="s3://bucket/x"))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match=f"{path.name} was changed.*run window {WINDOW} again"):
        next(iter_artifact(artifact))
    path.unlink()
    with pytest.raises(ArtifactError, match=f"{path.name} is missing: run window {WINDOW} again"):
        read_artifact(artifact)

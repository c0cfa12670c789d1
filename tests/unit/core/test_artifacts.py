import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from babylon.core.artifacts import (
    ArtifactWriter,
    iter_artifact,
    read_artifact,
    rewrite_artifact,
    write_artifact,
)
from babylon.core.errors import ArtifactError, StorageError
from babylon.core.home import Home

WINDOW = "2025-11-14T09:00"
FRAME = pl.DataFrame({"id": [str(n) for n in range(450)], "value": [n / 7 for n in range(450)]})


def path_of(artifact, root):
    return Path(Home(root).resolve(artifact.uri))


def test_the_same_rows_give_the_same_file_and_other_rows_another(tmp_path):
    tmp_path = tmp_path / "a b"
    first = write_artifact(Home(tmp_path), FRAME, window_id=WINDOW, stage="scored")
    again = write_artifact(Home(tmp_path), FRAME, window_id=WINDOW, stage="scored")
    other = write_artifact(Home(tmp_path), FRAME.tail(-1), window_id=WINDOW, stage="scored")
    assert first == again
    assert other.sha256 != first.sha256
    assert path_of(first, tmp_path).name == f"2025-11-14T09-00-scored-{first.sha256[:8]}.parquet"
    assert len(list((tmp_path / "artifacts").iterdir())) == 2
    assert first.rows == 450
    assert read_artifact(Home(tmp_path), first).equals(FRAME)


def test_rows_are_streamed_in_order_and_only_the_columns_asked_for(tmp_path):
    artifact = write_artifact(Home(tmp_path), FRAME, window_id=WINDOW)
    parts = list(iter_artifact(Home(tmp_path), artifact, ["id"]))
    assert len(parts) > 1
    assert pl.concat(parts).equals(FRAME.select("id"))


def test_rows_that_were_written_apart_are_read_apart(tmp_path):
    """A writer of large rows decides how many of them fit into memory."""
    home = Home(tmp_path)
    with ArtifactWriter(home, FRAME.schema, window_id=WINDOW) as writer:
        for part in (FRAME.head(2), FRAME.tail(3)):
            writer.write(part)
    rewritten = rewrite_artifact(home, writer.artifact, lambda frame: frame, stage="x")
    for artifact in (writer.artifact, rewritten):
        assert [len(part) for part in iter_artifact(home, artifact)] == [2, 3]


def test_rewriting_changes_every_part(tmp_path):
    artifact = write_artifact(Home(tmp_path), FRAME, window_id=WINDOW)
    doubled = rewrite_artifact(
        Home(tmp_path),
        artifact,
        lambda frame: frame.select("id", twice=pl.col("value") * 2),
        stage="x",
    )
    assert read_artifact(Home(tmp_path), doubled).equals(
        FRAME.select("id", twice=pl.col("value") * 2)
    )


def test_no_rows_keep_their_columns(tmp_path):
    artifact = write_artifact(Home(tmp_path), FRAME.clear(), window_id=WINDOW)
    assert (artifact.rows, read_artifact(Home(tmp_path), artifact).schema) == (0, FRAME.schema)


def test_a_failed_writer_leaves_nothing_behind(tmp_path):
    with (
        pytest.raises(RuntimeError),
        ArtifactWriter(Home(tmp_path), FRAME.schema, window_id=WINDOW) as writer,
    ):
        writer.write(FRAME)
        raise RuntimeError
    assert list((tmp_path / "artifacts").iterdir()) == []


async def test_a_cancelled_writer_ends_the_running_write_and_leaves_nothing(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    class SlowFrame(pl.DataFrame):
        def select(self, *columns):
            begun.set()
            go_on.wait(30)
            return super().select(*columns)

    async def cancelled_while_writing():
        async with ArtifactWriter(Home(tmp_path), FRAME.schema, window_id=WINDOW) as writer:
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
    assert list((tmp_path / "artifacts").iterdir()) == []


def test_a_changed_missing_foreign_or_newer_file_is_refused_with_its_name(tmp_path):
    artifact = write_artifact(Home(tmp_path), FRAME, window_id=WINDOW)
    path = path_of(artifact, tmp_path)
    with pytest.raises(ArtifactError, match="schema version 99"):
        read_artifact(Home(tmp_path), replace(artifact, schema_version=99))
    with pytest.raises(StorageError, match="s3://bucket/x: only files"):
        read_artifact(Home(tmp_path), replace(artifact, uri="s3://bucket/x"))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match=f"{path.name} was changed.*run window {WINDOW} again"):
        next(iter_artifact(Home(tmp_path), artifact))
    path.unlink()
    with pytest.raises(ArtifactError, match=f"{path.name} is missing: run window {WINDOW} again"):
        read_artifact(Home(tmp_path), artifact)

"""Readers of the dataset: datasets, polars, DuckDB and pandas, with each table, offline."""

import shutil
from pathlib import Path

import duckdb
import pandas
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from babylon.core.home import Home
from babylon.core.settings import PublishSettings
from babylon.dataset.card import README, render, write_card
from babylon.dataset.publish import describe_local
from babylon.dataset.schema import OUTCOMES, SCHEMAS, TRAJECTORIES
from babylon.dataset.table_file import SPLITS, TableName, split_of, write_table
from tests.unit.dataset.test_scrub import row

# One window of each split, and one of another month.
WINDOWS = ("2025-11-14T09:00", "2025-11-14T10:00", "2025-12-01T03:00")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = Home.at(tmp_path_factory.mktemp("home"))
    for window_id in WINDOWS:
        for config in SCHEMAS:
            rows: list[dict[str, object]] = [{"window_id": window_id}]
            if config == TRAJECTORIES:
                given = {"window_id": window_id, "pnl_usd": 2.5}
                rows = [
                    row(f"number {i}", **given, trajectory_id=f"{window_id}-{i}") for i in (0, 1)
                ]
            # Only one window has outcomes; a split without rows must not be in the card.
            empty = config == OUTCOMES and window_id != WINDOWS[0]
            write_table(home, TableName(config, window_id), [] if empty else [rows])
    files, _ = describe_local(home)
    write_card(home, files, PublishSettings(license="cc-by-4.0"))
    return home.datasets


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No hub can be asked, and the cache is this test's own."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return tmp_path


@pytest.mark.parametrize("config", [*SCHEMAS, None])
def test_load_dataset_reads_each_table_and_split(
    folder: Path, offline: Path, config: str | None
) -> None:
    import datasets

    loaded = datasets.load_dataset(str(folder), config, cache_dir=str(offline))
    windows = WINDOWS[:1] if config == OUTCOMES else WINDOWS
    assert {*loaded} == {split_of(window) for window in windows}
    assert len({split_of(window) for window in WINDOWS}) > 1
    told = [{*part["window_id"]} for part in loaded.values()]
    assert sum(map(len, told)) == len(set().union(*told))  # no window in two splits
    if config in (None, TRAJECTORIES):
        assert sum(map(len, loaded.values())) == 2 * len(WINDOWS)
        assert loaded["train"][0]["calls"][0]["prompt"][0]["role"] == "user"
    assert {*loaded["train"].column_names} == {*SCHEMAS[config or TRAJECTORIES].names}


def test_load_dataset_streams(folder: Path, offline: Path) -> None:
    import datasets

    rows = datasets.load_dataset(str(folder), split="train", streaming=True)
    first = next(iter(rows))
    assert first["calls"][0]["completion"][0]["content"] == "HOLD"


def test_a_newer_schema_is_read_beside_an_older_one(folder: Path, offline: Path) -> None:
    """A column that version 2 adds is null in files of version 1, and nothing else changes."""
    import datasets

    newer = offline / "newer"
    shutil.copytree(folder, newer)
    source = sorted((newer / TRAJECTORIES).rglob("*-train-????????.parquet"))[-1]
    table = pq.read_table(source)
    table = table.append_column("latency_ms", pa.array([7] * len(table), pa.int64()))
    pq.write_table(table, source)
    card = (newer / README).read_text()
    marked = "- config_name: trajectories\n  features:\n"
    card = card.replace(marked, f"{marked}  - name: latency_ms\n    dtype: int64\n")
    (newer / README).write_text(card)
    loaded = datasets.load_dataset(str(newer), split="train", cache_dir=str(offline / "cache"))
    assert {*loaded["latency_ms"]} == {7, None}
    # A reader of version 1 reads its own columns.
    pattern = f"{newer}/{TRAJECTORIES}/*/*.parquet"
    old = pl.scan_parquet(pattern, extra_columns="ignore").select("pnl_usd").collect()
    assert old.height == 2 * len(WINDOWS)
    found = duckdb.sql(f"SELECT latency_ms FROM read_parquet('{pattern}', union_by_name=true)")
    assert {row[0] for row in found.fetchall()} == {7, None}


def test_other_readers_take_a_table_as_a_whole(folder: Path) -> None:
    pattern = f"{folder}/{TRAJECTORIES}/*/*.parquet"
    many = 2 * len(WINDOWS)
    assert pl.read_parquet(pattern).height == many
    (total,) = duckdb.sql(f"SELECT sum(pnl_usd) FROM '{pattern}'").fetchall()
    assert total[0] == 2.5 * many
    frame = pandas.read_parquet(folder / TRAJECTORIES)
    assert len(frame) == many and {*frame["month"]} == {"2025-11", "2025-12"}


def test_the_card_tells_counts_splits_and_every_column(folder: Path) -> None:
    card = (folder / README).read_text()
    assert "6 trajectories of 1 agents in 3 windows (2025-11, 2025-12)" in card
    assert "license: cc-by-4.0" in card and "![Mean profit" in card
    assert (folder / "images/profit.png").read_bytes().startswith(b"\x89PNG")
    for schema in SCHEMAS.values():
        assert all(f"| `{name}` |" in card for name in schema.names)
    assert all(f"| {split} |" in card for split in SPLITS)


def test_the_same_data_gives_the_same_card(folder: Path) -> None:
    home = Home.at(folder.parent)
    files, _ = describe_local(home)
    before = {name: (folder / name).read_bytes() for name in (README, "images/profit.png")}
    write_card(home, files, PublishSettings(license="cc-by-4.0"))
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert "configs:" not in render([], PublishSettings())


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    digests = {
        write_table(
            Home.at(tmp_path / name), TableName(TRAJECTORIES, WINDOWS[0]), [[row("a")]]
        ).sha256
        for name in ("one", "two")
    }
    assert len(digests) == 1


def test_splits_have_about_their_shares() -> None:
    names = [
        split_of(f"2025-{m:02}-{d:02}T{h:02}:00")
        for m in (1, 2)
        for d in range(1, 28)
        for h in range(24)
    ]
    shares = {split: names.count(split) / len(names) for split in SPLITS}
    assert abs(shares["train"] - 0.9) < 0.03 and min(shares.values()) > 0.02
    assert split_of("2025-11-14T09:00+late") == split_of("2025-11-14T09:00")
    for hour in range(24):  # outcomes are of whole hours
        assert len({split_of(f"2025-11-14T{hour:02}:{m}") for m in ("00", "15", "45+late")}) == 1

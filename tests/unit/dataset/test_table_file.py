"""Names of the dataset's files, for windows of every length."""

from pathlib import Path

import pytest

from babylon.core.home import Home
from babylon.dataset.publish import describe_local
from babylon.dataset.schema import OUTCOMES
from babylon.dataset.table_file import (
    SPLITS,
    TableName,
    local_files,
    read_published,
    split_of,
    write_table,
)


@pytest.mark.parametrize("window_id", ["2025-11-14T09:00", "2025-11-14T09:15+late"])
def test_a_window_has_a_file_also_if_it_starts_within_an_hour(
    window_id: str, tmp_path: Path
) -> None:
    home = Home(tmp_path)
    written = write_table(home, TableName(OUTCOMES, window_id), [[{"window_id": window_id}]])
    ((config, path),) = local_files(home)
    assert (config, read_published(home, path)) == (OUTCOMES, written)
    assert split_of(window_id) == split_of(window_id.partition("+")[0]) in SPLITS


def test_a_damaged_file_is_named_and_left_out_of_the_card(tmp_path: Path) -> None:
    home, window = Home(tmp_path), "2025-11-14T09:00"
    write_table(home, TableName(OUTCOMES, window), [[{"window_id": window}]])
    cut = home.datasets / OUTCOMES / "2025-11" / "2025-11-15T09-00-train-00000000.parquet"
    cut.write_bytes(b"PAR1")
    (whole,), (damaged,) = describe_local(home)
    assert whole.window_id == window and str(cut) in damaged and "remove it" in damaged

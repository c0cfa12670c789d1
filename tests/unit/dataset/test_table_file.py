"""Names of the dataset's files, for windows of every length."""

from pathlib import Path

import pytest

from babylon.core.home import Home
from babylon.dataset.schema import OUTCOMES
from babylon.dataset.table_file import SPLITS, TableName, local_files, split_of, write_table


@pytest.mark.parametrize("window_id", ["2025-11-14T09:00", "2025-11-14T09:15+late"])
def test_a_window_has_a_file_also_if_it_starts_within_an_hour(
    window_id: str, tmp_path: Path
) -> None:
    home = Home(tmp_path)
    written = write_table(home, TableName(OUTCOMES, window_id), [[{"window_id": window_id}]])
    assert local_files(home) == [(OUTCOMES, written)]
    assert split_of(window_id) == split_of(window_id.partition("+")[0]) in SPLITS

"""The card: its code reads the tables that have rows."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from babylon.core.settings import PublishSettings
from babylon.dataset.card import render
from babylon.dataset.schema import OUTCOMES, SCHEMAS
from babylon.dataset.table_file import TableName, split_of
from babylon.store.published import PublishedFile

WINDOW = "2025-11-14T09:00"


@pytest.mark.parametrize("outcomes", [0, 3])
def test_the_code_loads_outcomes_only_if_there_are_any(outcomes: int) -> None:
    files = [
        PublishedFile(
            repository="", config=config, window_id=WINDOW, path=f"{config}/x.parquet", sha256="",
            bytes=1, rows=outcomes if config == OUTCOMES else 1, agents=(), trajectory_ids=(),
            revision="",
        )
        for config in SCHEMAS
    ]  # fmt: skip
    text = render(files, PublishSettings())
    line = f'outcomes = load_dataset("./datasets", "outcomes", split="{split_of(WINDOW)}")\nfor '
    assert (line in text) == bool(outcomes) == ('"outcomes", split' in text)
    assert "# the table trajectories\n" in text and "$" not in text.partition("## Tables")[0]


def test_the_name_of_a_recipe_puts_no_window_into_another_split() -> None:
    hours = (f"2025-11-14T{hour:02}:00" for hour in range(24))
    window = next(hour for hour in hours if split_of(hour) == "test") + "+re-train-2"
    name = TableName("trajectories", window)
    file = PublishedFile(
        repository="", config=name.config, window_id=WINDOW, sha256="", bytes=1, rows=1, agents=(),
        path=f"{name.folder}/{name.stem}-12345678.parquet", trajectory_ids=(), revision="",
    )  # fmt: skip
    text = render([file, replace(file, window_id=window)], PublishSettings())
    paths = [line.split()[1] for line in text.splitlines() if line.startswith("    path:")]
    assert [fnmatchcase(file.path, path) for path in paths] == [False, True]

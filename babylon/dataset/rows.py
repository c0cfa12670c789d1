"""The trajectories of a dataset, read back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from babylon.core.errors import ConfigError
from babylon.dataset.schema import TRAJECTORIES

_PORTION = 50


def trajectory_files(place: Path) -> list[Path]:
    """Return the files of the table ``trajectories``: of a dataset's folder, or the one file.

    Raises:
        ConfigError: there is none.
    """
    files = [place] if place.is_file() else sorted((place / TRAJECTORIES).rglob("*.parquet"))
    if not files:
        raise ConfigError(
            f"{place} has no files of the table {TRAJECTORIES}: give a dataset's folder, such as"
            " BABYLON_HOME/datasets after `babylon dataset build`"
        )
    return files


def read_rows(place: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the trajectories of a dataset, in the order of their windows.

    Raises:
        ConfigError: there is no file, or one that holds no trajectories.
    """
    for file in trajectory_files(place):
        try:
            table = pq.ParquetFile(file)
            if "calls" not in table.schema_arrow.names:
                raise ConfigError(
                    f"{file} is no file of the table {TRAJECTORIES}: name one of these"
                )
            for group in range(table.num_row_groups):  # few large rows are one
                for batch in table.iter_batches(_PORTION, [group], columns):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:  # the head, or a part after it
            raise ConfigError(
                f"{file} is damaged or no Parquet file ({error}): remove it, or name others"
            ) from error

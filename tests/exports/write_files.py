"""Write every export of two small plays, and a tiny model to train on them: ``FOLDER``."""

import shutil
import sys
from pathlib import Path

from babylon.core.home import Home
from babylon.dataset.export import export_dataset
from babylon.dataset.export_names import ExportTarget
from babylon.dataset.schema import TRAJECTORIES
from babylon.dataset.table_file import TableName, write_table
from tests.tiny_policy import tiny_model, tiny_tokenizer
from tests.unit.dataset.test_export import WINDOW, rows


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    home = Home.at(folder / "home")
    write_table(home, TableName(TRAJECTORIES, WINDOW), [rows()])
    for target in ExportTarget:
        export_dataset(home.datasets, target, folder / f"{target}.jsonl")
    tiny_model(1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

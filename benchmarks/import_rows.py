"""Speed and memory of ``babylon db import``.

    python -m benchmarks.import_rows [--trajectories 5000] [--logs 95000]

The files repeat the game's real rows: trajectories of 25 KB and call logs of 0.9 KB. The embedded
Postgres is new, and the figures are those of one import in this process.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from babylon.core.settings_loading import load_settings
from babylon.formats.import_files import import_files
from babylon.store import open_store

ROWS = Path(__file__).parents[1] / "tests" / "data" / "babylon"
PLAYED = 5  # of the real trajectories; the others are short


def repeated(name: str, keys: tuple[str, ...], count: int, distinct: int | None) -> Iterator[str]:
    """Yield JSON lines: the file's first rows over and over, under new values of ``keys``."""
    rows = [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]
    for number, row in enumerate(islice(cycle(rows[:distinct]), count)):
        yield json.dumps({**row, **dict.fromkeys(keys, f"{name}-{number}")}) + "\n"


def write_files(folder: Path, trajectories: int, logs: int) -> list[Path]:
    (folder / "users.jsonl").write_text((ROWS / "users.jsonl").read_text())
    for name, keys, count, distinct in (
        ("trajectories", ("id", "trajectoryId"), trajectories, PLAYED),
        ("llm_call_logs", ("id", "callId"), logs, None),
    ):
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(repeated(name, keys, count, distinct))
    return sorted(folder.glob("*.jsonl"))


async def measure(home: Path, files: list[Path]) -> dict[str, float]:
    async with open_store(load_settings(home=home, database={"url": None})) as store:
        before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begun = time.perf_counter()
        rows = sum((await import_files(store, files)).values())
        seconds = time.perf_counter() - begun
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rows": rows,
        "size_mb": sum(file.stat().st_size for file in files) / 1e6,
        "seconds": seconds,
        "rows_per_minute": 60 * rows / seconds,
        "more_memory_mb": peak_mb - before_mb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=5_000)
    parser.add_argument("--logs", type=int, default=95_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        files = write_files(Path(folder), options.trajectories, options.logs)
        figures = asyncio.run(measure(Path(folder) / "home", files))
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

"""The file of remembered checks stays of bounded size, however long a home lives."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from babylon.core.home import Home
from babylon.core.settings import QualitySettings
from babylon.core.windows import window_at
from babylon.stages import checked_rows
from babylon.stages.checked_rows import CheckedRows, NarrowRow

BEGIN = datetime(2025, 11, 14, tzinfo=UTC)


async def test_the_results_of_the_newest_windows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def batches(_: object, ids: list[str]) -> list[list[str]]:
        return [ids]

    async def read(_: object, store: object, ids: list[str]) -> dict[str, None]:
        return dict.fromkeys(ids)

    def check(self: Any, row: NarrowRow, wide: object, window: Any) -> None:
        decoded.append(row.trajectory_id)
        self._known[row.trajectory_id] = checked_rows.CheckedRow(
            row.version, checked_rows._name(window)
        )

    monkeypatch.setattr(checked_rows, "_MOST", 3)
    monkeypatch.setattr(checked_rows, "batches_of_plays", batches)
    monkeypatch.setattr(CheckedRows, "_read", read)
    monkeypatch.setattr(CheckedRows, "_decode", check)
    rows = []
    for hour in (4, 3, 2, 1, 0):
        window = window_at(BEGIN + timedelta(hours=hour))
        row = NarrowRow(
            trajectory_id=f"t{hour}",
            agent_id="a",
            window_id=window.id,
            start=window.start,
            version=hour,
        )
        rows.append((row, window))
    store: Any = SimpleNamespace(game=None)
    decoded: list[str] = []
    for part, unknown in ((rows, 5), (rows[:3], 0), (rows, 2)):
        checked = CheckedRows(QualitySettings(), Home.at(tmp_path))
        found = [row.trajectory_id async for row, _ in checked.check(store, part)]
        assert sorted(found) == sorted(row.trajectory_id for row, _ in part)
        assert len(decoded) == unknown
        decoded.clear()

"""Which windows the dataset consists of: those that were trained."""

from datetime import date

from babylon.metrics import scored_from
from babylon.store import Store
from babylon.store.windows import WindowRow, list_windows
from babylon.types import Claim, Scored
from babylon.windows import DONE, WindowState

TRAINED = DONE | {WindowState.TRAINED}


async def windows_of(store: Store, day: date | None = None) -> list[Scored]:
    """The scored manifests of the trained windows of a UTC day, or of all, oldest first."""
    rows = sorted(await list_windows(store), key=lambda row: row.window_id)
    return [
        _scored(row)
        for row in rows
        if row.state in TRAINED and (day is None or row.window_id.startswith(day.isoformat()))
    ]


def _scored(row: WindowRow) -> Scored:
    claim = Claim(window_id=row.window_id, epoch=row.epoch, owner=row.owner or "")
    return scored_from(claim, row.metrics)

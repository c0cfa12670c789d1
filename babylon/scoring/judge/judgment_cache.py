"""Where bought judgments are found again."""

from typing import Protocol

from babylon.store.judgments import Purchase


class JudgmentCache(Protocol):
    """``babylon.store.judgments.StoredJudgments`` in Postgres, or ``MemoryJudgments``."""

    async def find(self, key: str) -> Purchase | None: ...

    async def keep(self, purchase: Purchase) -> None: ...


class MemoryJudgments:
    """For judging without a database: gone with the process."""

    def __init__(self) -> None:
        self._kept: dict[str, Purchase] = {}

    async def find(self, key: str) -> Purchase | None:
        return self._kept.get(key)

    async def keep(self, purchase: Purchase) -> None:
        known = self._kept.get(purchase.key)
        if known is None or known.problem is not None:
            self._kept[purchase.key] = purchase

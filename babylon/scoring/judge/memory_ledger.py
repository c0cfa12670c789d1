"""A ledger in memory, for judging without a database."""

from collections.abc import Collection
from dataclasses import replace

from babylon.scoring.judge.budget import Budget
from babylon.store.judgments import Accounts, Purchase, Spent


class MemoryJudgments:
    """Judgments of one window. ``entries`` is the ledger, in the order of requests."""

    def __init__(self) -> None:
        self.entries: list[Purchase] = []

    async def find(self, key: str) -> Purchase | None:
        found = [entry for entry in self.entries if entry.key == key]
        return min(found, key=lambda entry: entry.problem is not None, default=None)

    async def spent(self) -> Accounts:
        tokens = sum(entry.prompt_tokens + entry.completion_tokens for entry in self.entries)
        total = Spent(tokens=tokens, usd=sum(entry.usd for entry in self.entries))
        return Accounts(window=total, day=total)

    async def enter(self, purchase: Purchase, budget: Budget) -> int:
        cost = purchase.prompt_tokens + purchase.completion_tokens
        budget.require(await self.spent(), Spent(tokens=cost, usd=purchase.usd))
        self.entries.append(purchase)
        return len(self.entries) - 1

    async def settle(self, number: int, purchase: Purchase) -> None:
        self.entries[number] = purchase

    async def forget(self, keys: Collection[str]) -> None:
        for number, entry in enumerate(self.entries):
            if entry.key in keys and entry.problem is not None:
                self.entries[number] = replace(entry, key=f"{entry.key}/forgotten")

"""The judge's budget: limits of a window and of a UTC day, in tokens and US dollars.

A request is entered into the ledger at its worst case before it is sent, and at its real cost after
its answer. An entry without an answer keeps the worst case, because the server may have done the
work. The ledger checks the limits and enters the request in one step, so requests at the same time,
also of other processes, cannot exceed a limit together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from babylon.core.errors import WindowNotReadyError
from babylon.store.judgments import Accounts, Purchase, Spent

T = TypeVar("T")


class BudgetSpentError(WindowNotReadyError):
    """The judge's budget does not allow the next request.

    The window waits. A later run with more budget reuses the judgments that were bought.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Maximum tokens and US dollars. None means no limit."""

    tokens: int | None = None
    usd: float | None = None

    def allow(self, spent: Spent) -> bool:
        within_tokens = self.tokens is None or spent.tokens <= self.tokens
        return within_tokens and (self.usd is None or spent.usd <= self.usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of one window and of one UTC day. No limit by default."""

    window: BudgetLimits = field(default_factory=BudgetLimits)
    day: BudgetLimits = field(default_factory=BudgetLimits)

    def fits(self, spent: Accounts, cost: Spent) -> bool:
        """Return True if the cost stays within every limit."""
        return self._exceeded(spent, cost) is None

    def require(self, spent: Accounts, cost: Spent) -> None:
        """Do nothing if the cost fits.

        Raises:
            BudgetSpentError: it does not.
        """
        if (name := self._exceeded(spent, cost)) is not None:
            limits, used = (self.window, spent.window)
            if name == "day":
                limits, used = (self.day, spent.day)
            parts = [] if limits.tokens is None else [f"{used.tokens} of {limits.tokens} tokens"]
            parts += [] if limits.usd is None else [f"${used.usd:.4f} of ${limits.usd:g}"]
            raise BudgetSpentError(
                f"the judge's budget of the {name} is spent: {', '.join(parts)}; the next request"
                f" costs up to {cost.tokens} tokens and ${cost.usd:.4f}; raise"
                f" JUDGE_{name.upper()}_TOKENS or JUDGE_{name.upper()}_USD, or wait"
            )

    def _exceeded(self, spent: Accounts, cost: Spent) -> str | None:
        if not self.window.allow(plus(spent.window, cost)):
            return "window"
        return None if self.day.allow(plus(spent.day, cost)) else "day"


@dataclass(slots=True)
class InFlight:
    """Requests of one window's judges that may yet cost less than they are charged."""

    count: int = 0
    settled: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until_it_fits(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try, and try again after each answer as long as requests are in flight.

        Raises:
            BudgetSpentError: it does not fit, and no request is in flight.
        """
        async with self.settled:
            while True:
                try:
                    return await attempt()
                except BudgetSpentError:
                    if not self.count:
                        raise
                    await self.settled.wait()


def plus(one: Spent, other: Spent) -> Spent:
    """Return the sum of tokens, US dollars and requests."""
    return Spent(
        tokens=one.tokens + other.tokens,
        usd=one.usd + other.usd,
        requests=one.requests + other.requests,
    )


class JudgeLedger(Protocol):
    """Store of bought judgments, such as ``babylon.store.judgments.StoredJudgments``."""

    async def find(self, key: str) -> Purchase | None:
        """Return the usable reply to a prompt, else an unusable one, else ``None``."""

    async def spent(self) -> Accounts:
        """Return what the window and the day cost so far, requests in flight included."""

    async def enter(self, purchase: Purchase, budget: Budget) -> int:
        """Enter a request at its worst case and return the entry's number.

        Raises:
            BudgetSpentError: the worst case does not fit.
        """

    async def settle(self, number: int, purchase: Purchase) -> None:
        """Replace an entry by what became of the request."""

    async def forget(self, keys: Collection[str]) -> None:
        """Find no unusable reply by these keys any more. Its cost stays."""

"""The judge's budget: tokens and US dollars of a window and of a UTC day.

Each request reserves an upper estimate before it is sent, and settles its real cost afterwards.
Therefore requests in flight count. Requests in flight in other processes do not count, so several
processes may together exceed the day's limit by those requests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from babylon.core.errors import WindowNotReadyError
from babylon.store.judgments import Spent


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


@dataclass(slots=True)
class Reservation:
    """The reserved estimate. The caller replaces ``cost`` with the real cost."""

    cost: Spent


class Budget:
    """The budget of one window: limits of the window and the day, and the amounts spent before."""

    def __init__(
        self,
        window: BudgetLimits | None = None,
        day: BudgetLimits | None = None,
        *,
        spent_on_window: Spent | None = None,
        spent_today: Spent | None = None,
    ) -> None:
        self._limits = {"window": window or BudgetLimits(), "day": day or BudgetLimits()}
        self._before = {"window": spent_on_window or Spent(), "day": spent_today or Spent()}
        self.spent = Spent()  # in this run, reservations included

    def fits(self, cost: Spent) -> bool:
        """Return True if the cost stays within every limit."""
        return self._exceeded(cost) is None

    @contextmanager
    def reserve(self, estimate: Spent) -> Iterator[Reservation]:
        """Reserve an estimate while a request runs. The caller sets ``cost`` to the real cost.

        Raises:
            BudgetSpentError: the estimate does not fit.
        """
        if (limit := self._exceeded(estimate)) is not None:
            raise BudgetSpentError(
                f"the judge's budget of the {limit} is spent: {self._used(limit)}; the next request"
                f" costs up to {estimate.tokens} tokens and ${estimate.usd:.4f}; raise"
                f" JUDGE_{limit.upper()}_TOKENS or JUDGE_{limit.upper()}_USD, or wait"
            )
        reservation = Reservation(estimate)
        self.spent = plus(self.spent, estimate)
        try:
            yield reservation
        except BaseException:
            reservation.cost = Spent()
            raise
        finally:
            released = Spent(tokens=-estimate.tokens, usd=-estimate.usd)
            self.spent = plus(plus(self.spent, released), reservation.cost)

    def _exceeded(self, cost: Spent) -> str | None:
        for name, limits in self._limits.items():
            if not limits.allow(plus(plus(self._before[name], self.spent), cost)):
                return name
        return None

    def _used(self, name: str) -> str:
        limits, spent = self._limits[name], plus(self._before[name], self.spent)
        parts = [] if limits.tokens is None else [f"{spent.tokens} of {limits.tokens} tokens"]
        parts += [] if limits.usd is None else [f"${spent.usd:.4f} of ${limits.usd:g}"]
        return ", ".join(parts)


def plus(one: Spent, other: Spent) -> Spent:
    """Return the sum of tokens and US dollars."""
    return Spent(tokens=one.tokens + other.tokens, usd=one.usd + other.usd)

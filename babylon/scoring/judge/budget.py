"""What judging may still cost: tokens and US dollars, of a window and of a UTC day.

Each request reserves an upper estimate before it is sent and settles what it really cost, so that
requests in flight are counted. Processes that judge other windows at the same time are not: they
may together exceed the day's limit by what each has in flight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from babylon.core.errors import WindowNotReadyError
from babylon.store.judgments import Spent


class BudgetSpentError(WindowNotReadyError):
    """The judge's budget does not allow the next request. The window waits: a later run, when the
    budget is fresh or larger, goes on with what was bought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Most tokens and US dollars; None is no limit."""

    tokens: int | None = None
    usd: float | None = None

    def allow(self, spent: Spent) -> bool:
        within_tokens = self.tokens is None or spent.tokens <= self.tokens
        return within_tokens and (self.usd is None or spent.usd <= self.usd)


@dataclass(slots=True)
class Reservation:
    """An estimate that becomes what it cost."""

    cost: Spent


class Budget:
    """One window's; ``window`` and ``day`` are limits with what was spent of each before."""

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
        """Would that much more stay within every limit?"""
        return self._exceeded(cost) is None

    @contextmanager
    def reserve(self, estimate: Spent) -> Iterator[Reservation]:
        """Hold an estimate while a request runs; the caller sets ``cost`` to what it came to.

        Raises:
            BudgetSpentError: the estimate does not fit.
        """
        if (limit := self._exceeded(estimate)) is not None:
            raise BudgetSpentError(
                f"the judge's budget of the {limit} is spent: {self._told(limit)}, the next request"
                f" costs up to {estimate.tokens} tokens and ${estimate.usd:.4f}; raise"
                f" JUDGE_{limit.upper()}_TOKENS or JUDGE_{limit.upper()}_USD, or wait"
            )
        reservation = Reservation(estimate)
        self.spent = _plus(self.spent, estimate)
        try:
            yield reservation
        except BaseException:
            reservation.cost = Spent()
            raise
        finally:
            released = Spent(tokens=-estimate.tokens, usd=-estimate.usd)
            self.spent = _plus(_plus(self.spent, released), reservation.cost)

    def _exceeded(self, cost: Spent) -> str | None:
        for name, limits in self._limits.items():
            if not limits.allow(_plus(_plus(self._before[name], self.spent), cost)):
                return name
        return None

    def _told(self, name: str) -> str:
        limits, spent = self._limits[name], _plus(self._before[name], self.spent)
        parts = [] if limits.tokens is None else [f"{spent.tokens} of {limits.tokens} tokens"]
        parts += [] if limits.usd is None else [f"${spent.usd:.4f} of ${limits.usd:g}"]
        return ", ".join(parts)


def _plus(one: Spent, other: Spent) -> Spent:
    return Spent(tokens=one.tokens + other.tokens, usd=one.usd + other.usd)

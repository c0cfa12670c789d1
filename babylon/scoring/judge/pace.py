"""The pace of requests: limits a minute, and the wait that a server asks for.

Requests and tokens a minute become a least distance between two requests. In any minute, the
requests that start stay within the limit, and one more.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Time at which the next request may start, in seconds of a clock of the caller's choice.

    ``requests`` and ``tokens`` are limits a minute. None means no limit.
    """

    requests: int | None = None
    tokens: int | None = None
    held_until: float = 0.0  # the server asked for this; it also holds starts given out before
    _next: float = 0.0

    def start(self, now: float, tokens: int) -> float:
        """Return the moment at which a request of ``tokens`` tokens may start, and reserve it."""
        moment = max(now, self._next)
        distance = 60 / self.requests if self.requests else 0.0
        if self.tokens:
            distance = max(distance, 60 * tokens / self.tokens)
        self._next = moment + distance
        return moment

    def hold(self, until: float) -> None:
        """Let no request start before ``until``, not even one whose start was given out."""
        self.held_until = max(self.held_until, until)

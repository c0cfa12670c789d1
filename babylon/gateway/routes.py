"""The route in force in this process: one immutable object, swapped by one assignment.

A request takes its reference and counts itself in without an await in between, so it is served
by exactly one policy version, and a version is unloaded only when nobody uses it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from babylon.wire import RequestError


@dataclass(frozen=True, slots=True)
class Target:
    """A policy under its immutable name in the engine."""

    name: str
    policy_version: int
    path: str


@dataclass(frozen=True, slots=True)
class Route:
    """What serves. ``previous`` stays loaded, so that a rollback has nothing to load."""

    route_version: int
    alias: str
    current: Target
    previous: Target | None = None

    @property
    def targets(self) -> Mapping[str, Target]:
        """Each model name that may be asked for."""
        kept = [target for target in (self.current, self.previous) if target]
        return {self.alias: self.current} | {target.name: target for target in kept}

    def successor(self, route_version: int, target: Target) -> "Route":
        if target == self.current:  # a route to the same policy: keep what is kept
            return Route(route_version, self.alias, target, self.previous)
        return Route(route_version, self.alias, target, self.current)


class RouteTable:
    """The current route, who uses which policy, and why nothing can be served (if so)."""

    def __init__(self) -> None:
        self.route: Route | None = None
        self.unavailable: str | None = "the gateway is starting"
        self.in_flight: Counter[str] = Counter()

    @contextmanager
    def take(self, model: str) -> Iterator[tuple[Route, Target]]:
        """The route and the policy for one request, held until the block ends.

        Raises:
            RequestError: 503, nothing can be served now; 404, there is no such model.
        """
        if self.unavailable or self.route is None:
            raise RequestError(503, self.unavailable or "no route", code="unavailable")
        route = self.route
        target = route.targets.get(model)
        if target is None:
            raise RequestError(
                404,
                f"the model {model!r} does not exist: there is {', '.join(route.targets)}",
                code="model_not_found",
            )
        self.in_flight[target.name] += 1
        try:
            yield route, target
        finally:
            self.in_flight[target.name] -= 1

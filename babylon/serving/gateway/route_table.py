"""The route in force in this process: one immutable object, swapped by one assignment.

A request takes its reference and counts itself in without an await in between, so it is served
by exactly one policy version, and a version is unloaded only when nobody uses it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from babylon.core.types import Arm
from babylon.serving.openai_wire import RequestError

CHAMPION: Arm = "champion"
CHALLENGER: Arm = "challenger"
PINNED = "pinned"  # asked for by its version: part of no comparison


@dataclass(frozen=True, slots=True)
class Target:
    """A policy under its immutable name in the engine."""

    name: str
    policy_version: int
    path: str


@dataclass(frozen=True, slots=True)
class ArmSplit:
    """A challenger that answers ``share`` of the agents; ``salt``, the experiment's, says which."""

    challenger: Target
    share: float
    salt: str

    def arm(self, key: str) -> Arm:
        """The same in every process; an agent that is the challenger's stays so when the share
        grows."""
        digest = blake2b((self.salt + key).encode(), digest_size=8).digest()
        return CHALLENGER if int.from_bytes(digest) < self.share * 2**64 else CHAMPION


@dataclass(frozen=True, slots=True)
class ServingRoute:
    """What serves. ``others`` are loaded too: the champion before, so that a rollback has nothing
    to load, and what is proposed. They answer by their names."""

    route_version: int
    alias: str
    champion: Target
    split: ArmSplit | None = None
    others: tuple[Target, ...] = ()
    targets: Mapping[str, Target] = field(init=False, compare=False)  # by what they are asked for

    def __post_init__(self) -> None:
        named = {target.name: target for target in (*self.arms, *self.others)}
        object.__setattr__(self, "targets", {self.alias: self.champion} | named)

    @property
    def arms(self) -> tuple[Target, ...]:
        return (self.champion, self.split.challenger) if self.split else (self.champion,)

    def assign(self, model: str, key: str, pin: Arm | None = None) -> "Assignment":
        """Who answers a call: the one place where that is decided.

        Args:
            key: whose call it is; under the alias the split goes by it alone,
            pin: unless the call's trajectory began with this arm.

        Raises:
            RequestError: 404, there is no such model.
        """
        if model != self.alias:
            return Assignment(self, PINNED, self._named(model))
        if self.split and (pin or self.split.arm(key)) == CHALLENGER:
            return Assignment(self, CHALLENGER, self.split.challenger)
        return Assignment(self, CHAMPION, self.champion)

    def _named(self, model: str) -> Target:
        target = self.targets.get(model)
        if target is None:
            raise RequestError(
                404,
                f"the model {model!r} does not exist: there is {', '.join(self.targets)}",
                code="model_not_found",
            )
        return target


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one request is served by, from its beginning to its end."""

    route: ServingRoute
    arm: str
    target: Target


class RouteTable:
    """The current route, and why nothing can be served (if so).

    ``in_flight``: how many calls use which policy version; ``routed``: those of them that a route
    sent there, not a version asked for by its name, so that a version which serves no more runs
    out of them. ``idle`` is told of a version whose last call of either kind has ended.
    """

    def __init__(self) -> None:
        self.route: ServingRoute | None = None
        self.unavailable: str | None = "the gateway is starting"
        self.in_flight: Counter[int] = Counter()
        self.routed: Counter[int] = Counter()
        self.idle: Callable[[int], None] = lambda version: None

    @contextmanager
    def take(self, model: str, key: str, pin: Arm | None = None) -> Iterator[Assignment]:
        """The policy for one request, held until the block ends.

        Raises:
            RequestError: 503, nothing can be served now; 404, there is no such model.
        """
        if self.unavailable or self.route is None:
            raise RequestError(503, self.unavailable or "no route", code="unavailable")
        assignment = self.route.assign(model, key, pin)
        version = assignment.target.policy_version
        counts = (self.in_flight,) if assignment.arm == PINNED else (self.routed, self.in_flight)
        for count in counts:
            count[version] += 1
        try:
            yield assignment
        finally:
            for count in counts:
                count[version] -= 1
                if not count[version]:
                    del count[version]
                    self.idle(version)

"""The route in force in this process: one immutable object, replaced by one assignment.

A request reads the route and counts itself in without an await in between. So exactly one policy
version answers it, and a version is unloaded only when no request uses it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from babylon.core.types import Arm
from babylon.serving.gateway.readiness import Readiness
from babylon.serving.openai_wire import RequestError
from babylon.store.gateways import Desired

CHAMPION: Arm = "champion"
CHALLENGER: Arm = "challenger"
PINNED = "pinned"  # a version asked for by name: in no comparison


@dataclass(frozen=True, slots=True)
class Target:
    """A policy under its immutable name in the engine."""

    name: str
    policy_version: int
    path: str


@dataclass(frozen=True, slots=True)
class ArmSplit:
    """A challenger that answers ``share`` of the agents, chosen by the experiment's ``salt``."""

    challenger: Target
    share: float
    salt: str

    def arm(self, key: str) -> Arm:
        """Return the arm of an agent (or API key), the same in every process.

        The challenger keeps its agents when the share grows.
        """
        digest = blake2b((self.salt + key).encode(), digest_size=8).digest()
        return CHALLENGER if int.from_bytes(digest) < self.share * 2**64 else CHAMPION


@dataclass(frozen=True, slots=True)
class ServingRoute:
    """The policies that serve.

    ``others`` are loaded and answer only by name: the previous champion, for a rollback without
    loading, and proposals. ``targets`` maps the names in requests to policies.
    """

    route_version: int
    alias: str
    champion: Target
    split: ArmSplit | None = None
    others: tuple[Target, ...] = ()
    targets: Mapping[str, Target] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        named = {target.name: target for target in (*self.arms, *self.others)}
        object.__setattr__(self, "targets", {self.alias: self.champion} | named)

    @property
    def arms(self) -> tuple[Target, ...]:
        return (self.champion, self.split.challenger) if self.split else (self.champion,)

    def assign(self, model: str, key: str, pin: Arm | None = None) -> "Assignment":
        """Return the policy that answers a call. Nothing else decides this.

        Args:
            key: agent or API key, which selects the arm for calls to the alias.
            pin: the arm of the call's trajectory, which takes precedence.

        Raises:
            RequestError: 404, unknown model.
        """
        if model != self.alias:
            if model not in self.targets:
                known = ", ".join(self.targets)
                message = f"the model {model!r} does not exist: use one of {known}"
                raise RequestError(404, message, code="model_not_found")
            return Assignment(self, PINNED, self.targets[model])
        if self.split and (pin or self.split.arm(key)) == CHALLENGER:
            return Assignment(self, CHALLENGER, self.split.challenger)
        return Assignment(self, CHAMPION, self.champion)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Route, arm and policy of one request, from its beginning to its end."""

    route: ServingRoute
    arm: str
    target: Target


class RouteTable:
    """The route in force, the calls that use it, and whether they are served.

    ``in_flight`` counts the running calls by policy version. ``routed`` counts those that a route
    sent there, and not the version's name in the request: it reaches 0 when a version has left the
    route. ``idle`` is called when either count of a version reaches 0.
    """

    def __init__(self) -> None:
        self.route: ServingRoute | None = None
        self.readiness = Readiness()
        self.in_flight: Counter[int] = Counter()
        self.routed: Counter[int] = Counter()
        self.idle: Callable[[int], None] = lambda version: None

    @contextmanager
    def take(self, model: str, key: str, pin: Arm | None = None) -> Iterator[Assignment]:
        """Take the policy for one request, and count the request until the block ends.

        Raises:
            RequestError: 503, nothing can be served; 404, unknown model.
        """
        if self.readiness.unavailable or self.route is None:
            raise RequestError(503, self.readiness.told, code="unavailable")
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


Occasion = str | None


def wanted(desired: Desired) -> dict[int, Occasion]:
    """Return the policies to hold, the most urgent first: champion, challenger, proposals, and the
    previous champion, for a rollback without loading.

    Returns:
        Policy version → the occasion of a single attempt to load it, or ``None`` for the route's
        own policies, whose loads are retried.
    """
    route = desired.route
    versions: dict[int, Occasion] = {route.policy_version: None}
    if route.split:
        versions[route.split.challenger_version] = None
    for version, proposal_id in desired.proposals.items():
        versions.setdefault(version, f"proposal {proposal_id}")
    if desired.previous is not None:
        versions.setdefault(desired.previous, f"route {route.route_version}")
    return versions


def next_route(
    alias: str, desired: Desired, loaded: Mapping[int, Target], current: ServingRoute | None
) -> ServingRoute | None:
    """Return the desired route if its arms are loaded, else the current one.

    Its ``others`` are the remaining wanted policies that are loaded.

    Args:
        loaded: policy version → its target.
    """
    row, split = desired.route, desired.route.split
    champion = loaded.get(row.policy_version)
    challenger = loaded.get(split.challenger_version) if split else None
    if champion and (challenger or not split):
        arms = ArmSplit(challenger, split.share, split.salt) if challenger and split else None
        current = ServingRoute(row.route_version, alias, champion, arms)
    if current is None:
        return None
    others = tuple(
        loaded[version]
        for version in wanted(desired)
        if version in loaded and loaded[version] not in current.arms
    )
    return ServingRoute(current.route_version, alias, current.champion, current.split, others)

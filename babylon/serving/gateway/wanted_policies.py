"""The policies that a gateway must hold, and the route that it can serve with them. No I/O."""

from collections.abc import Mapping

from babylon.serving.gateway.route_table import ArmSplit, ServingRoute, Target
from babylon.store.gateways import Desired

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

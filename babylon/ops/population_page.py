"""Each member of the population with what its updates achieved."""

from collections import defaultdict
from dataclasses import dataclass
from math import sqrt
from typing import Any

from babylon.stages.siblings import rated
from babylon.store.connection import Store
from babylon.store.population import Sibling, list_members, list_siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStanding:
    """A member. ``fitness``: mean P&L less the parent's in dollars a world, with its standard
    error; None before it has played. ``chosen``: number of windows that it won."""

    generation: int
    member: int
    parent: int | None
    origin: str
    genes: dict[str, Any]
    fitness: float | None
    error: float | None
    windows: int
    chosen: int


async def population_standings(store: Store) -> list[MemberStanding]:
    """Return all members, oldest generation first."""
    siblings: dict[int, list[Sibling]] = defaultdict(list)
    for one in await list_siblings(store):
        siblings[one.generation].append(one)
    means = {generation: rated(own) for generation, own in siblings.items()}
    return [
        MemberStanding(
            generation=row.generation,
            member=row.member,
            parent=row.parent,
            origin=row.origin,
            genes=row.genes,
            fitness=means.get(row.generation, {}).get(row.member),
            error=_error([s for s in siblings[row.generation] if s.member == row.member]),
            windows=sum(s.member == row.member for s in siblings[row.generation]),
            chosen=sum(s.member == row.member and s.chosen for s in siblings[row.generation]),
        )
        for row in await list_members(store)
    ]


def _error(own: list[Sibling]) -> float | None:
    """Standard error of the mean of independent windows."""
    errors = [one.fitness_error for one in own if one.fitness_error is not None]
    return sqrt(sum(error**2 for error in errors)) / len(errors) if errors else None

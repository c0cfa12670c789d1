"""Evolution of settings: elites stay, the others descend from winners of small tournaments.

``evolve`` is pure: equal members and an equal generator give equal children. It knows nothing of
models. Source: population-based training (Jaderberg et al. 2017, arXiv 1711.09846), with the
tournament of genetic algorithms (Goldberg and Deb 1991) in place of its truncation.

Departures: members of a generation are siblings, which all start from the serving policy with each
window. What is inherited are settings, never weights, so the policies stay one line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from babylon.training.population.genes import GENES, Genes, Value

Origin = Literal["founder", "elite", "mutant"]
TOURNAMENT = 2
SHARE = 0.5  # of the genes that mutate, at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationMember:
    """Settings that are tried. ``parent`` is a member of the generation before."""

    generation: int
    member: int
    parent: int | None
    origin: Origin
    genes: Genes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """A member and its fitness. None: none of its updates could be measured."""

    member: PopulationMember
    fitness: float | None


def founders(genes: Genes, size: int, rng: Random) -> list[PopulationMember]:
    """The first generation: the given settings, and mutants of them."""
    first = PopulationMember(generation=0, member=0, parent=None, origin="founder", genes=genes)
    others = [
        PopulationMember(
            generation=0, member=n, parent=None, origin="founder", genes=mutated(genes, rng)
        )
        for n in range(1, size)
    ]
    return [first, *others]


def evolve(rated: Sequence[Rated], elites: int, size: int, rng: Random) -> list[PopulationMember]:
    """The next generation of ``size`` members; elites come first, the best one foremost.

    Raises:
        ValueError: there is no member, or no room beside the elites.
    """
    if not rated or not 1 <= elites <= size:
        raise ValueError(f"{elites} elites of {len(rated)} members for {size} places: give others")
    # Elites are never mutated: a good setting must not be lost to a bad draw.
    order = sorted(rated, key=_worth, reverse=True)
    generation = order[0].member.generation + 1
    children = [
        PopulationMember(
            generation=generation,
            member=number,
            parent=best.member.member,
            origin="elite",
            genes=best.member.genes,
        )
        for number, best in enumerate(order[:elites])
    ]
    for number in range(len(children), size):
        entrants = rng.sample(order, min(TOURNAMENT, len(order)))
        winner = max(entrants, key=_worth)
        children.append(
            PopulationMember(
                generation=generation,
                member=number,
                parent=winner.member.member,
                origin="mutant",
                genes=mutated(winner.member.genes, rng),
            )
        )
    return children


def mutated(genes: Genes, rng: Random) -> dict[str, Value]:
    """Genes of which about half have changed, at least one."""
    names = sorted(genes)
    chosen = {name for name in names if rng.random() < SHARE} or {rng.choice(names)}
    return {
        name: GENES[name].mutated(genes[name], rng) if name in chosen else genes[name]
        for name in names
    }


def _worth(one: Rated) -> tuple[float, int]:
    """Equal members: the one with the lower number, which is the older one."""
    fitness = float("-inf") if one.fitness is None else one.fitness
    return fitness, -one.member.member

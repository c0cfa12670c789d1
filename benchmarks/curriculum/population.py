"""A population in every hour: siblings with their own learning rates, of which the fittest serves.

The members follow from the gains of the hours before, so that a run that was stopped goes on.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

from babylon.core.learning_settings import PreferenceSettings, TrainingSettings
from babylon.evaluation.arena.fitness import FitnessWorlds, best_of, fitness
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.training.population.evolve import PopulationMember, Rated, evolve
from babylon.training.population.genes import training_with
from benchmarks.curriculum.hours import Moved, Window
from benchmarks.curriculum.play import seats_of
from benchmarks.curriculum.updates import PREFERENCES, own_update

FOUNDERS = (5e-4, 1e-4, 2e-3, 5e-6)  # the demo's rate, two others, and one that learns nothing
EVOLVE_EVERY, FITNESS_WORLDS = 2, 128


def population_update(
    window: Window,
    training: TrainingSettings,
    target: Path,
    asked: PreferenceSettings = PREFERENCES,
    rates: Sequence[float] = FOUNDERS,
) -> Moved:
    """Train each member on the window, and keep the one that earns most in fresh worlds."""
    tried = members(rates, [hour.gains for hour in window.before], window.seed)
    places = [target.with_name(f"{target.name}-{one.member}") for one in tried]
    moved = [
        own_update(window, training_with(training, one.genes), place, asked)
        for one, place in zip(tried, places, strict=True)
    ]
    seats = seats_of(window.level)
    seed = f"curriculum:{window.level.name}:{window.seed}:{window.hour}"
    rules = window.level.rules(window.hour)
    fresh = unseen_scenarios("fitness", seed, FITNESS_WORLDS // seats, rules)
    worlds = FitnessWorlds(scenarios=tuple(fresh), seats=seats)
    parent, *own = (worlds.played_by(str(path), window.seed) for path in (window.policy, *places))
    rated = [fitness(parent, plays) for plays in own]
    gains = tuple(None if one.unfit else one.mean for one in rated)
    best = best_of(gains)
    shutil.rmtree(target, ignore_errors=True)  # of this hour, stopped before it was written down
    if any(gain is not None for gain in gains):
        shutil.copytree(places[best], target)
    else:  # the gate would refuse all of them
        shutil.copytree(window.policy, target)
    for place in places:
        shutil.rmtree(place)
    return replace(moved[best], gains=gains)


def members(
    rates: Sequence[float], gains: Sequence[Sequence[float | None]], seed: int
) -> list[PopulationMember]:
    """Return the members after hours with these gains. The founders have ``rates``.

    An unfit sibling, None, counts as the worst of its hour, as in ``babylon.stages.siblings``.
    """
    known = [
        [
            min((g for g in hour if g is not None), default=0.0) if gain is None else gain
            for gain in hour
        ]
        for hour in gains
    ]
    found = [
        PopulationMember(
            generation=0, member=n, parent=None, origin="founder", genes={"learning_rate": rate}
        )
        for n, rate in enumerate(rates)
    ]
    for hour in range(EVOLVE_EVERY, len(known) + 1, EVOLVE_EVERY):
        each = zip(*known[hour - EVOLVE_EVERY : hour], strict=True)
        rated = [
            Rated(member=member, fitness=fmean(own))
            for member, own in zip(found, each, strict=True)
        ]
        found = evolve(rated, 1, len(found), Random(f"{seed}:{hour}"))
    return found

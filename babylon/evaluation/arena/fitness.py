"""The fitness of siblings: their P&L less their parent's, all in the same worlds.

The best of several siblings is partly the luckiest one. Its luck stays here: these worlds are made
for this purpose alone, and the gate then plays others. Its promise, at most one false promotion in
forty, therefore holds for the best of N as for any other policy. ``benchmarks.population`` measures
both, and what a gate on these worlds would do.

The gate refuses a policy whose replies are malformed more often than the champion's, whatever it
earns. A sibling that would be refused for this is unfit, so that a window is not lost to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from babylon.core.learning_settings import Precision
from babylon.core.settings import EvaluationSettings
from babylon.evaluation.arena.play import Plays, play
from babylon.evaluation.arena.players import checkpoint_player
from babylon.evaluation.arena.recorded_worlds import gate_worlds
from babylon.evaluation.arena.ruling import more_malformed
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.scenario import Scenario
from babylon.store.connection import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    """Mean difference to the parent in dollars a world, and its standard error.

    ``unfit``: why the gate would refuse the sibling whatever it earns; None if it would not.
    """

    mean: float
    error: float
    worlds: int
    unfit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitnessWorlds:
    """Worlds in which siblings are compared. ``seats`` players share each market."""

    scenarios: tuple[Scenario, ...]
    seats: int

    def played_by(self, path: str, seed: int, precision: Precision = "fp32") -> Plays:
        """Let a checkpoint play in this process, because no gateway knows a sibling. Blocking.

        Raises:
            ModelError: the checkpoint does not load.
        """
        decide = checkpoint_player(path, seed, precision)
        return play(decide, self.scenarios, seats=self.seats, copies=self.seats)


async def fitness_worlds(
    store: Store, window_id: str, name: str, evaluation: EvaluationSettings, count: int
) -> FitnessWorlds | None:
    """Return fresh worlds of the rules that the fleet plays; None if nothing shows these rules."""
    gate = await gate_worlds(store, window_id, name, evaluation)
    if gate is None:
        return None
    rules = gate.scenarios[-1].rules  # the fresh worlds come last
    made = unseen_scenarios("fitness", name, max(1, count // gate.seats), rules)
    return FitnessWorlds(scenarios=tuple(made), seats=gate.seats)


def fitness(parent: Plays, own: Plays) -> Fitness:
    """Compare two players of the same worlds."""
    difference = own.pnl - parent.pnl
    n = len(difference)
    spread = float(np.std(difference, ddof=1)) if n > 1 else float("inf")
    return Fitness(
        mean=float(difference.mean()),
        error=spread / sqrt(n),
        worlds=n,
        unfit=more_malformed(parent, own),
    )


def best_of(found: Sequence[float | None]) -> int:
    """Return the index of the fittest; the first one if none is known. None: unknown or unfit."""
    means = [float("-inf") if one is None else one for one in found]
    return means.index(max(means))

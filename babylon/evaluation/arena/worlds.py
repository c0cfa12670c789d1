"""The worlds of a gate, in the order in which they are played."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from babylon.evaluation.arena.betting import Floats
from babylon.evaluation.arena.bounds import most_lost, most_won
from babylon.game.market.scenario import Scenario

BATCH = 128  # worlds between two looks
Source = Literal["recorded", "simulated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldBatch:
    """Worlds that are played between two looks. Bets on them have ``weight``, at most 1."""

    scenarios: tuple[Scenario, ...]
    source: Source = "simulated"
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GateWorlds:
    """All worlds of a gate. ``seats`` players share each market."""

    batches: tuple[WorldBatch, ...]
    seats: int = 1

    @cached_property
    def scenarios(self) -> list[Scenario]:
        return [scenario for batch in self.batches for scenario in batch.scenarios]

    @cached_property
    def budget(self) -> int:
        return sum(len(batch.scenarios) for batch in self.batches)

    @cached_property
    def weights(self) -> Floats:
        """Weight of each world ``[budget]``."""
        return np.repeat(
            [batch.weight for batch in self.batches], [len(b.scenarios) for b in self.batches]
        )

    @cached_property
    def credit(self) -> Floats:
        """Largest P&L of each world ``[budget]`` that counts, dollars."""
        return np.array([most_won(scenario.rules) for scenario in self.scenarios])

    @cached_property
    def room(self) -> Floats:
        """Largest possible difference of two players' credited P&L in each world ``[budget]``."""
        return self.credit + [most_lost(scenario.rules) for scenario in self.scenarios]

    def played(self, count: int) -> dict[Source, int]:
        """Return the number of worlds of each source among the first ``count``."""
        counts: dict[Source, int] = {}
        for batch in self.batches:
            if part := min(count, len(batch.scenarios)):
                counts[batch.source] = counts.get(batch.source, 0) + part
            count -= part
        return counts


def simulated(scenarios: Sequence[Scenario], seats: int = 1) -> GateWorlds:
    """Return fresh worlds in batches."""
    starts = range(0, len(scenarios), BATCH)
    parts = [tuple(scenarios[start : start + BATCH]) for start in starts]
    return GateWorlds(batches=tuple(WorldBatch(scenarios=p) for p in parts), seats=seats)


def told(counts: dict[Source, int]) -> str:
    """Return the counts in words: ``16 recorded and 128 simulated worlds``."""
    return " and ".join(f"{count} {source}" for source, count in counts.items()) + " worlds"

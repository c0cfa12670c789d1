"""What a look at an experiment found: plain records, ``dataclasses.asdict`` gives JSON."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

Decision = Literal["promote", "rollback", "keep", "insufficient"]
State = Literal["passes", "doubtful", "broken", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Challenger less champion, with the ends of a 95 % confidence sequence.

    The means are those of agents, over the same mixture of stages. ``explained``: share of the
    variance of the difference that the agents' play before the experiment took away.
    ``information``: how many independent plays, half of them on each side, would say as much.
    """

    champion: float
    challenger: float
    champion_agents: int
    challenger_agents: int
    difference: float
    low: float
    high: float
    explained: float = 0.0
    information: float = 0.0

    def __str__(self) -> str:
        return f"{self.difference:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRatio:
    """Agents on each side against the split: ``expected`` challengers, and how probable a count
    at least as improbable as this one is."""

    champion: int
    challenger: int
    expected: float
    p_value: float
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Guardrail:
    """Something that the challenger must not make worse by more than ``bound``.

    ``champion`` and ``challenger`` are shares, or milliseconds for latencies; ``change`` with its
    ends is their difference, or their ratio. ``unknown``: too few agents to say.
    """

    name: str
    state: State
    bound: float
    champion: float | None = None
    challenger: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """One look at an experiment, and what follows from it.

    ``pnl`` decides: USD a play, adjusted for the agents' play before the experiment; ``raw_pnl`` is
    the same without that. ``score`` is told where play was judged, and decides nothing.
    ``excluded``: why plays were left out → how many. ``crossed``: agents that a change of the share
    moved to the other arm.
    """

    experiment: str
    mode: str
    champion_version: int
    challenger_version: int
    shares: tuple[float, ...]
    began_at: datetime
    ended_at: datetime | None
    reviewed_at: datetime
    hours: float
    decision: Decision
    reason: str
    agents: SampleRatio
    measured_agents: SampleRatio
    plays: int
    calls: int
    crossed: int
    pnl: Comparison | None = None
    raw_pnl: Comparison | None = None
    score: Comparison | None = None
    guardrails: tuple[Guardrail, ...] = ()
    excluded: dict[str, int] = field(default_factory=dict)

    @property
    def warns(self) -> bool:
        """Is the sample ratio broken, or a guardrail at least doubtful? No time for more agents."""
        broken = self.agents.broken or self.measured_agents.broken
        return broken or any(guard.state in ("doubtful", "broken") for guard in self.guardrails)

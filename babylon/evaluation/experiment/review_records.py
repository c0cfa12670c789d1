"""Records of an experiment's review; ``dataclasses.asdict`` makes JSON of them."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

Decision = Literal["promote", "rollback", "keep", "insufficient"]
State = Literal["passes", "doubtful", "broken", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Challenger minus champion, with the ends of a 95 % confidence sequence.

    ``champion`` and ``challenger`` are means over agents, with the same weights of stages.
    ``explained``: share of the difference's variance that play before the experiment explains.
    ``information``: number of independent plays, half in each arm, with the same variance.
    ``unseen``: what ``low`` is lower by, for a loss that is too rare to have been seen.
    ``shared``: share of the variance that comes from luck that an arm's agents share in an hour.
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
    unseen: float = 0.0
    shared: float = 0.0

    def __str__(self) -> str:
        return f"{self.difference:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRatio:
    """Agents in each arm against the split.

    ``expected`` is the expected number of challengers. ``p_value`` is the probability of a count at
    least as improbable as this one.
    """

    champion: int
    challenger: int
    expected: float
    p_value: float
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Guardrail:
    """A measure that the challenger must not make worse by more than ``bound``.

    ``champion`` and ``challenger`` are shares, or milliseconds for latencies. ``change``, ``low``
    and ``high`` are their difference, or the ratio for latencies. ``unknown``: too few agents.
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
    """A review of an experiment, with its decision.

    ``pnl`` decides: USD per play, adjusted for the agents' play before the experiment. ``raw_pnl``
    is unadjusted. ``score`` compares judged play and decides nothing. ``excluded``: number of
    excluded plays by reason. ``crossed``: agents that a change of the share moved to the other arm.
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
        """True if the sample ratio is broken or a guardrail is at least doubtful.

        The challenger's share must not grow then.
        """
        broken = self.agents.broken or self.measured_agents.broken
        return broken or any(guard.state in ("doubtful", "broken") for guard in self.guardrails)

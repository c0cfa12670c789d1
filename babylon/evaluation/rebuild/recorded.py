"""Records of replay: rows as they were written, and the scenarios rebuilt from them."""

from dataclasses import dataclass
from typing import Literal, TypedDict

import msgspec

from babylon.core.llm_calls import LlmCall
from babylon.game.market.scenario import Scenario

Prices = Literal["exact", "seen", "interpolated"]


class RecordedState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The ``environmentState`` of a step. ``market`` is a ``SeenTick`` if a fleet wrote it."""

    agent_balance: float
    agent_pnl: float = msgspec.field(name="agentPnL")
    market: object = None


class RecordedAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Data that the agent read from a provider."""

    data: object = None


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An element of ``stepsJson``. ``timestamp`` is in milliseconds since 1970, UTC."""

    timestamp: float
    environment_state: RecordedState
    provider_accesses: tuple[RecordedAccess, ...] = ()
    llm_calls: tuple[LlmCall, ...] = ()

    @property
    def reply(self) -> str | None:
        """The step's last action reply, which was carried out; None if there was no action call."""
        actions = [call for call in self.llm_calls if call.purpose == "action"]
        return (actions[-1].response or "") if actions else None


class MarketOutcome(TypedDict, total=False):
    """A row of ``market_outcomes``, by the game's column names: a ticker's or a market's."""

    stockTicker: str | None
    startPrice: float | None
    endPrice: float | None
    predictionMarketId: str | None
    outcome: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """A trajectory as it was written, with at least one step.

    ``knowledge`` (the game's ``gameKnowledge``) and ``outcomes`` (the window's market outcomes) are
    ground truth.
    """

    trajectory_id: str
    agent_id: str
    window_id: str
    scenario_id: str
    pnl_usd: float
    steps: tuple[RecordedStep, ...]
    knowledge: dict[str, object]
    outcomes: tuple[MarketOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlay:
    """An agent's replies, one per tick, and its P&L in USD.

    ``replies`` is empty if the ticks of the replies are unknown.
    """

    trajectory_id: str
    agent_id: str
    replies: tuple[str, ...]
    pnl_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScenario:
    """A scenario and how it was played.

    ``players`` shared one market, in the order of joining; empty: every agent had its own copy.
    ``prices`` is the source of the prices. ``exact``: the recorded game's, at full precision.
    ``seen``: those that agents saw, minute by minute. ``interpolated``: some are straight lines
    from a known start to a known end. ``missing`` lists what was not recorded.
    """

    window_id: str
    scenario: Scenario
    plays: tuple[RecordedPlay, ...]
    players: tuple[str, ...] = ()
    prices: Prices = "exact"
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A scenario that cannot be replayed, with the reason."""

    window_id: str
    scenario_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The scenarios that can be replayed and those that were skipped."""

    scenarios: tuple[RecordedScenario, ...]
    skipped: tuple[Skipped, ...] = ()

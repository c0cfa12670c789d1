"""What was recorded of play, and what replay makes of it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from babylon.game.market.scenario import Scenario

Prices = Literal["exact", "seen", "interpolated"]


class RecordedState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Of ``environmentState``; ``market`` is a ``SeenTick``, where a fleet wrote it."""

    agent_balance: float
    agent_pnl: float = msgspec.field(name="agentPnL")
    market: Any = None


class RecordedAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Data that the agent looked at."""

    data: Any = None


class RecordedReply(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Of an LLM call."""

    purpose: str = ""
    user_prompt: str = ""
    response: str | None = None


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One element of ``stepsJson``; ``timestamp`` in milliseconds since 1970, UTC."""

    timestamp: float
    environment_state: RecordedState
    provider_accesses: tuple[RecordedAccess, ...] = ()
    llm_calls: tuple[RecordedReply, ...] = ()

    @property
    def moment(self) -> datetime:
        return datetime.fromtimestamp(self.timestamp / 1000, UTC)

    @property
    def reply(self) -> str | None:
        """The last one, which was acted on."""
        asked = self._asked
        return (asked[-1].response or "") if asked else None

    @property
    def prompt(self) -> str:
        """What was said to the agent for that reply."""
        asked = self._asked
        return asked[-1].user_prompt if asked else ""

    @property
    def _asked(self) -> list[RecordedReply]:
        return [call for call in self.llm_calls if call.purpose == "action"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """A trajectory as it was written, with at least one step; ``knowledge`` (the game's
    ``gameKnowledge``) and ``outcomes`` (the window's market outcomes) are ground truth."""

    trajectory_id: str
    agent_id: str
    window_id: str
    scenario_id: str
    start: datetime
    pnl_usd: float
    steps: tuple[RecordedStep, ...]
    knowledge: dict[str, Any]
    outcomes: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlay:
    """What one agent answered, a reply a tick, and the P&L (USD) that it made of it. No replies:
    nothing says in which tick it answered what."""

    trajectory_id: str
    agent_id: str
    replies: tuple[str, ...]
    pnl_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScenario:
    """A scenario that was played, and how.

    ``players`` share one market, in that order; where there are none, every agent has its own copy.
    ``prices`` says where the prices come from: ``exact`` are those of the recorded game to the
    last digit, ``seen`` those that were seen in the minutes of the window, ``interpolated`` has
    straight lines from a known start to a known end. ``missing`` tells what was not recorded.
    """

    window_id: str
    scenario: Scenario
    plays: tuple[RecordedPlay, ...]
    players: tuple[str, ...] = ()
    prices: Prices = "exact"
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A scenario that cannot be replayed, and why."""

    window_id: str
    scenario_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The scenarios that can be replayed, and those that cannot."""

    scenarios: tuple[RecordedScenario, ...]
    skipped: tuple[Skipped, ...] = ()

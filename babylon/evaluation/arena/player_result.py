"""What remains of a player's plays: small enough to be kept, drawn and sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from babylon.evaluation.arena.confidence import Interval, mean_interval
from babylon.evaluation.arena.play import Plays, play, scripted
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS

YARDSTICKS = ("random", "news", "oracle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """P&L of each scenario in simulator dollars; the means of the rest.

    ``equity`` ``[ticks + 1]``: mean profit so far, before each tick and after settlement.
    """

    pnl: tuple[float, ...]
    equity: tuple[float, ...]
    win_rate: float
    malformed: float
    drawdown: float

    @property
    def mean_pnl(self) -> Interval:
        """With the 95 % interval of a single look."""
        return mean_interval(self.pnl)


def result_of(plays: Plays) -> Result:
    return Result(
        pnl=tuple(plays.pnl.round(4).tolist()),
        equity=tuple(plays.equity.mean(axis=0).round(4).tolist()),
        win_rate=float(plays.win_rate.mean()),
        malformed=float(plays.malformed.mean()),
        drawdown=float(plays.drawdown.mean()),
    )


def yardsticks(worlds: Sequence[Scenario]) -> dict[str, Result]:
    """Scripted agents on the same worlds: chance, the news believed, and all that can be known."""
    return {name: result_of(play(scripted(SCRIPTED_AGENTS[name]), worlds)) for name in YARDSTICKS}

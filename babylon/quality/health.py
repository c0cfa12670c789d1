"""Health of a window's data: its figures beside those of the last windows of its length.

A figure raises an alarm if it lies far outside the range of the last windows:

    |figure - median| > 4 * max(|q - median|, floor)

where q is the 95 % quantile above the median and the 5 % quantile below it. Nothing is assumed
about the distribution. Each side has its own spread, so that a skewed figure is not taken for an
outlier; the quantiles hold a daily rhythm, and an incident of a few hours does not widen them. The
floor is the least change that matters: for a share the noise of so few trajectories, for others a
tenth of the median. Agents and outcomes also alarm when there are none, although 95 % of the last
windows had some. In simulations of 10,000 windows, none of those with normal figures raised an
alarm, and 0.4 % of those with log-normal P&L. A change that lasts counts as normal after about nine
windows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from babylon.core.game_rows import GameRow
from babylon.core.trajectories import Trajectory
from babylon.quality.behaviour import BehaviourTally
from babylon.store.window_health import Figures, HealthAlarm

HISTORY = 168  # windows to compare with: a week of hours
LEAST_HISTORY = 12
FENCE = 4.0
_LEAST_SHARE = 0.025  # an alarm is a change of ten percentage points or more
_LEAST_USD = 1.0


@dataclass(slots=True)
class PlayTally:
    """Counts the rows of a window while they are checked."""

    agents: set[str] = field(default_factory=set)
    eligible_agents: set[str] = field(default_factory=set)
    rejected: int = 0
    pnl_usd: list[float] = field(default_factory=list)
    calls: int = 0
    without_tokens: int = 0
    behaviour: BehaviourTally = field(default_factory=BehaviourTally)

    def reject(self, row: GameRow) -> None:
        self.agents.add(row.agent_id)
        self.rejected += 1
        self.behaviour.add_steps(row.steps_json)

    def accept(self, trajectory: Trajectory, steps_json: str = "[]") -> None:
        self.behaviour.add_steps(steps_json)
        self.behaviour.add_replies(trajectory)
        self.agents.add(trajectory.agent_id)
        self.eligible_agents.add(trajectory.agent_id)
        self.pnl_usd.append(trajectory.pnl_usd)
        self.calls += len(trajectory.calls)
        self.without_tokens += sum(call.retokenized for call in trajectory.calls)

    def figures(self, outcomes: int | None) -> dict[str, float]:
        """Return the figures of the window; one that nothing is known about is left out."""
        rows = self.rejected + len(self.pnl_usd)
        figures: dict[str, float] = {"trajectories": rows, "agents": len(self.agents)}
        if outcomes is not None:
            figures["outcomes"] = outcomes
        if rows:
            figures["rejected_share"] = self.rejected / rows
        if self.calls:
            figures["calls_without_tokens_share"] = self.without_tokens / self.calls
        if self.pnl_usd:
            figures["pnl_median_usd"] = median(self.pnl_usd)
            figures["pnl_extreme_usd"] = max(map(abs, self.pnl_usd))
        return figures | self.behaviour.figures()


def _share_noise(middle: float, trajectories: float) -> float:
    """Return the standard deviation of a share among so few trajectories."""
    p = (middle * trajectories + 1) / (trajectories + 2)
    return max(_LEAST_SHARE, math.sqrt(p * (1 - p) / max(trajectories, 1)))


def _eighth(middle: float, _: float) -> float:
    return abs(middle) / 8


def _correlation_noise(middle: float, trajectories: float) -> float:
    """Return the standard deviation of a correlation of so few trajectories."""
    return max(0.05, (1 - middle**2) / math.sqrt(max(trajectories - 1, 1)))


def _tenth(middle: float, _: float) -> float:
    return abs(middle) / 10


def _usd(middle: float, _: float) -> float:
    return max(_LEAST_USD, abs(middle) / 10)


@dataclass(frozen=True, slots=True)
class _Watch:
    """The alarms of one figure: what it means, in which directions, and its floor.

    The floor depends on the figure ``of``, a share's denominator. ``hack``: its
    alarm is a sign of reward hacking.
    """

    meaning: str
    floor: Callable[[float, float], float]
    high: bool = False
    low: bool = False
    of: str = "trajectories"
    hack: bool = False


_WATCHED = {
    "agents": _Watch("agents that played", _tenth, low=True),
    "rejected_share": _Watch("share of rejected trajectories", _share_noise, high=True, hack=True),
    "calls_without_tokens_share": _Watch("share of calls without tokens", _share_noise, high=True),
    "outcomes": _Watch("market outcomes", _tenth, low=True),
    "pnl_median_usd": _Watch("median P&L in USD", _usd, high=True, low=True),
    "pnl_extreme_usd": _Watch("largest gain or loss in USD", _usd, high=True),
    "hold_share": _Watch(
        "share of actions that hold", _share_noise, high=True, of="actions", hack=True
    ),
    "failed_share": _Watch(
        "share of actions that failed", _share_noise, high=True, of="actions", hack=True
    ),
    "malformed_share": _Watch(
        "share of replies without an order", _share_noise, high=True, of="replies", hack=True
    ),
    "question_share": _Watch(
        "share of replies that ask back", _share_noise, high=True, of="replies", hack=True
    ),
    "unscored_share": _Watch("share of plays without a score", _share_noise, high=True, hack=True),
    "distinct_share": _Watch("share of distinct plays", _share_noise, low=True, hack=True),
    "action_entropy_bits": _Watch("entropy of actions in bits", _eighth, low=True, hack=True),
    "reply_characters": _Watch(
        "mean characters of a reply", _eighth, high=True, low=True, hack=True
    ),
    "score_pnl_correlation": _Watch(
        "correlation of scores with profit", _correlation_noise, low=True, hack=True
    ),
    "score_pnl_correlation_all": _Watch(
        "correlation of scores with profit, of failing plays too",
        _correlation_noise,
        low=True,
        hack=True,
    ),
}
WATCHED = tuple(_WATCHED)
HACKS = frozenset(name for name, watch in _WATCHED.items() if watch.hack)


def find_alarms(now: Figures, before: Sequence[Figures]) -> list[HealthAlarm]:
    """Return the alarms of a window. ``before``: the figures of the last windows, in any order.

    With fewer than ``LEAST_HISTORY`` windows there are none.
    """
    alarms = []
    for name, watch in _WATCHED.items():
        last = [figures[name] for figures in before if name in figures]
        if name in now and len(last) >= LEAST_HISTORY:
            reason = _reason(watch, now[name], last, now[watch.of])
            if reason:
                alarms.append(HealthAlarm(figure=name, reason=reason))
    return alarms


def _reason(watch: _Watch, figure: float, last: Sequence[float], trajectories: float) -> str:
    low, *_, high = quantiles(last, n=20, method="inclusive")
    middle = median(last)
    floor = watch.floor(middle, trajectories)
    above = watch.high and figure - middle > FENCE * max(high - middle, floor)
    below = watch.low and middle - figure > FENCE * max(middle - low, floor)
    gone = watch.low and not watch.high and not watch.hack and figure == 0 < low
    if not (above or below or gone):
        return ""
    return (
        f"{watch.meaning}: {figure:.4g}; in the last {len(last)} windows {middle:.4g}, mostly"
        f" {low:.4g} to {high:.4g}"
    )

"""A match of champion and challenger, played in batches until the result is clear.

The challenger is promoted once the confidence sequence of its paired P&L difference lies above
zero. It is rejected once the sequence lies below zero, or once its replies or its drawdown are
notably worse. If neither happens within the budget, or can hardly happen any more, the evidence is
insufficient and the champion stays. A challenger that is only as good as the champion therefore
hardly ever passes, and losses too small to detect cannot add up over the hours.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from babylon.core.types import Ruling
from babylon.evaluation.arena.confidence import Interval, can_reach, confidence_sequence
from babylon.evaluation.arena.play import Decide, Plays, joined, play
from babylon.game.market.scenario import Scenario

BATCH = 128  # scenarios between two looks: enough for a nearly normal mean
MAX_EXTRA_MALFORMED = 0.02  # share of replies
MAX_EXTRA_DRAWDOWN = 0.1  # share of the start balance, on top of the extra profit
COLLAPSED = 0.95  # share of all decisions that are the same one
Progress = Callable[[int, int], None]  # (scenarios played, scenarios at most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The paired P&L difference after ``scenarios`` scenarios."""

    scenarios: int
    difference: Interval
    hopeful: bool  # the rest of the budget may still show a gain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """A finished match: both players' results, the looks and the ruling."""

    champion: Plays
    challenger: Plays
    looks: tuple[Look, ...]
    ruling: Ruling
    reason: str


async def compare(
    champion: Decide,
    challenger: Decide,
    worlds: Sequence[Scenario],
    progress: Progress | None = None,
) -> Match:
    """Let both play the worlds, batch by batch, until there is a ruling."""
    before: list[Plays] = []
    after: list[Plays] = []
    looks: list[Look] = []
    ended = None
    for first in range(0, len(worlds), BATCH):
        batch = worlds[first : first + BATCH]
        before.append(await asyncio.to_thread(play, champion, batch))
        after.append(await asyncio.to_thread(play, challenger, batch))
        champions, challengers = joined(before), joined(after)
        looks.append(look_at(champions, challengers, len(worlds)))
        if progress is not None:
            progress(looks[-1].scenarios, len(worlds))
        if ended := ruled(champions, challengers, looks[-1], len(worlds)):
            break
    assert ended is not None  # the last look always rules
    return Match(
        champion=champions,
        challenger=challengers,
        looks=tuple(looks),
        ruling=ended[0],
        reason=ended[1],
    )


def look_at(champion: Plays, challenger: Plays, budget: int) -> Look:
    """Return the look after the scenarios that both played, out of ``budget``."""
    differences = challenger.pnl - champion.pnl
    # With t* at a quarter of the budget, the sequence is at most 2 % wider than the tightest
    # possible one, both at an eighth of the budget and at its end.
    tightest = budget / 4
    return Look(
        scenarios=len(differences),
        difference=confidence_sequence(differences, tightest),
        hopeful=can_reach(differences, tightest, budget),
    )


def ruled(champion: Plays, challenger: Plays, look: Look, budget: int) -> tuple[Ruling, str] | None:
    """Return (ruling, reason with figures) on the play so far; None while undecided."""
    difference = look.difference
    if reason := unfit(champion, challenger):
        return "reject", reason
    if difference.low > 0:
        return "promote", f"P&L difference {difference} is a gain"
    if difference.high < 0:
        return "reject", f"P&L difference {difference} is a loss"
    if look.hopeful and look.scenarios < budget:
        return None
    return "insufficient", (
        f"insufficient evidence: P&L difference {difference} after {look.scenarios} of {budget}"
        " scenarios" + ("" if look.scenarios == budget else "; the rest could hardly change it")
    )


def unfit(champion: Plays, challenger: Plays) -> str | None:
    """Return the reason why a challenger must not serve regardless of its P&L, if there is one."""
    before, after = float(champion.malformed.mean()), float(challenger.malformed.mean())
    if after > before + MAX_EXTRA_MALFORMED:
        return (
            f"malformed replies rose from {before:.1%} to {after:.1%};"
            f" the limit is {MAX_EXTRA_MALFORMED:.0%} more"
        )
    decision, share = challenger.commonest
    if share >= COLLAPSED and champion.commonest[1] < COLLAPSED:
        return f"collapsed: {share:.1%} of its decisions are the same, {decision}"
    before, after = float(champion.drawdown.mean()), float(challenger.drawdown.mean())
    gain = max(0.0, challenger.mean_pnl - champion.mean_pnl)
    allowed = MAX_EXTRA_DRAWDOWN * champion.start_balance + gain
    if after > before + allowed:
        return f"drawdown rose from ${before:.0f} to ${after:.0f}; the limit is ${allowed:.0f} more"
    return None

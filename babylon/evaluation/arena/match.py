"""Champion against challenger, batch by batch, until it is clear either way.

A challenger is promoted once the confidence sequence of its paired P&L difference lies above
zero, and rejected once it lies below zero, or as soon as its replies or its losses on the way are
notably worse. Whoever is neither by the end of the budget, or could hardly become so, is not
promoted: the evidence is insufficient. A challenger as good as the champion therefore hardly ever
passes, and small losses, each too small to be seen, cannot add up over the hours.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from babylon.core.types import Ruling
from babylon.evaluation.arena.confidence import Interval, can_reach, confidence_sequence
from babylon.evaluation.arena.play import Decide, Plays, joined, play
from babylon.game.market.scenario import Scenario

BATCH = 128  # scenarios between two looks: enough for the first mean to be nearly normal
MAX_EXTRA_MALFORMED = 0.02  # share of replies
MAX_EXTRA_DRAWDOWN = 0.1  # share of the start balance, above what it earns more
COLLAPSED = 0.95  # share of one decision among all
Progress = Callable[[int, int], None]  # scenarios played, of at most so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was known of the paired P&L difference after so many scenarios."""

    scenarios: int
    difference: Interval
    hopeful: bool  # may the rest of the budget still show a gain?


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """How it was played and how it ended."""

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
    """Both play the worlds, the first batch of all and the next while nothing is clear."""
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
    assert ended is not None  # the last look rules
    return Match(
        champion=champions,
        challenger=challengers,
        looks=tuple(looks),
        ruling=ended[0],
        reason=ended[1],
    )


def look_at(champion: Plays, challenger: Plays, budget: int) -> Look:
    """What is known after the scenarios that both played, of ``budget`` that they may."""
    differences = challenger.pnl - champion.pnl
    tightest = budget / 4  # at an eighth of the budget and at all of it 2 % wider than it could be
    return Look(
        scenarios=len(differences),
        difference=confidence_sequence(differences, tightest),
        hopeful=can_reach(differences, tightest, budget),
    )


def ruled(champion: Plays, challenger: Plays, look: Look, budget: int) -> tuple[Ruling, str] | None:
    """(ruling, reason with the numbers) on what was played so far; None while it is open."""
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
        " scenarios" + ("" if look.scenarios == budget else ", of which the rest would not help")
    )


def unfit(champion: Plays, challenger: Plays) -> str | None:
    """Why a challenger must not serve, whatever it earned."""
    before, after = float(champion.malformed.mean()), float(challenger.malformed.mean())
    if after > before + MAX_EXTRA_MALFORMED:
        return (
            f"malformed replies rose from {before:.1%} to {after:.1%},"
            f" allowed is {MAX_EXTRA_MALFORMED:.0%} more"
        )
    decision, share = challenger.commonest
    if share >= COLLAPSED and champion.commonest[1] < COLLAPSED:
        return f"collapsed: {share:.1%} of its replies decide the same, {decision}"
    before, after = float(champion.drawdown.mean()), float(challenger.drawdown.mean())
    gain = max(0.0, challenger.mean_pnl - champion.mean_pnl)
    allowed = MAX_EXTRA_DRAWDOWN * champion.start_balance + gain
    if after > before + allowed:
        return f"drawdown rose from ${before:.0f} to ${after:.0f}, allowed is ${allowed:.0f} more"
    return None

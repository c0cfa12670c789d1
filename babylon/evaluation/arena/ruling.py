"""The gate's rule: promote, reject, or insufficient evidence, and the reason.

The challenger is promoted once betting on its gain has earned 40 times its capital
(``babylon.evaluation.arena.betting``), and if its worst worlds are not notably worse. It is
rejected once betting on its loss has earned as much, or once its replies or its drawdown are
notably worse. If neither happens within the budget, or can hardly happen any more, the evidence is
insufficient and the champion stays.

In a shared market a strategy may win alone and lose among its copies. There, a gain is needed for
one copy among champions, for half of the seats, and for all of them, each compared with a market of
champions only. All three must be believed, so none needs a stricter level.
"""

from dataclasses import dataclass

import numpy as np

from babylon.core.types import Ruling
from babylon.evaluation.arena.betting import CERTAIN, Differences, can_reach, log_wealth, sequence
from babylon.evaluation.arena.play import Floats, Plays
from babylon.evaluation.arena.worlds import GateWorlds

MAX_EXTRA_MALFORMED = 0.02  # share of replies
MAX_EXTRA_RISK = 0.1  # share of the start balance, on top of the extra profit
FEWEST = 32  # worlds before replies and risks are judged
COLLAPSED = 0.95  # share of all decisions that are the same one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standings:
    """The play so far. In a shared market ``champion`` and ``challenger`` had all its seats.

    ``crowds``: a challenger's mean P&L ``[n]`` with fewer copies among champions, by their number.
    """

    champion: Plays
    challenger: Plays
    crowds: dict[int, Floats]

    def present(self, worlds: GateWorlds) -> tuple[Plays, Plays]:
        """Return both players' results in the worlds that count at least half."""
        recent = worlds.weights[: len(self.champion.pnl)] >= 0.5
        chosen = recent if recent.any() else ~recent
        return self.champion.chosen(chosen), self.challenger.chosen(chosen)

    def differences(self, worlds: GateWorlds) -> list[Differences]:
        """Return the paired differences of all copies, then of each smaller number."""
        count = len(self.champion.pnl)
        credit, room = worlds.credit[:count], worlds.room[:count]
        before = np.minimum(self.champion.pnl, credit)
        return [
            Differences(np.minimum(pnl, credit) - before, room, room, worlds.weights[:count])
            for pnl in (self.challenger.pnl, *self.crowds.values())
        ]


def fewer_copies(seats: int) -> list[int]:
    """Return the numbers of copies, less than all, that a challenger is tried with."""
    return sorted({1, seats // 2} - {0, seats})


def ruled(standings: Standings, worlds: GateWorlds) -> tuple[Ruling, str] | None:
    """Return (ruling, reason with figures) on the play so far; None while undecided."""
    # A regime that is over neither condemns nor excuses a challenger's risks.
    champion, challenger = standings.present(worlds)
    differences, budget = standings.differences(worlds), worlds.budget
    played = len(standings.champion.pnl)
    if played >= min(FEWEST, budget) and (reason := unfit(champion, challenger, budget)):
        return "reject", reason
    gains = [log_wealth(one, budget)[-1] >= CERTAIN for one in differences]
    doubt = worse_at_worst(champion, challenger)
    if all(gains) and doubt is None:
        return "promote", f"P&L difference {sequence(differences[0], budget)} is a gain"
    for one, copies in zip(differences, (worlds.seats, *standings.crowds), strict=True):
        if log_wealth(one.reversed, budget)[-1] >= CERTAIN:
            crowd = f" with {copies} of {worlds.seats} seats" if worlds.seats > 1 else ""
            return "reject", f"P&L difference {sequence(one, budget)} is a loss{crowd}"
    open_yet = [one for one, gain in zip(differences, gains, strict=True) if not gain]
    if played < budget and all(can_reach(one, budget) for one in open_yet):
        return None
    if all(gains) and doubt is not None:
        return "reject", doubt
    return "insufficient", (
        f"insufficient evidence: P&L difference {sequence(differences[0], budget)} after {played}"
        f" of {budget} scenarios"
        + ("" if played == budget else "; the rest could hardly change it")
    )


def worse_at_worst(champion: Plays, challenger: Plays) -> str | None:
    """Return the reason against a promotion despite a gain, if there is one."""
    if challenger.mean_pnl <= champion.mean_pnl:
        return (
            f"mean P&L ${challenger.mean_pnl:.0f} is below ${champion.mean_pnl:.0f} once winnings"
            " beyond the credit count"
        )
    if reason := more_malformed(champion, challenger):
        return reason
    before, after = champion.tail, challenger.tail
    allowed = _allowed(champion, challenger)
    if after < before - allowed:
        return (
            f"P&L in the worst 5 % of the worlds fell from ${before:.0f} to ${after:.0f};"
            f" the limit is ${allowed:.0f} less"
        )
    return None


def unfit(champion: Plays, challenger: Plays, budget: int) -> str | None:
    """Return the reason why a challenger must not serve regardless of its P&L, if there is one."""
    rise = challenger.malformed - champion.malformed
    whole = np.ones_like(rise)  # a world's share of malformed replies changes by at most 1
    shares = Differences(rise, whole, whole)
    certain = log_wealth(shares, budget, MAX_EXTRA_MALFORMED)[-1] >= CERTAIN
    if certain and (reason := more_malformed(champion, challenger)):
        return reason
    decision, share = challenger.commonest
    if share >= COLLAPSED and champion.commonest[1] < COLLAPSED:
        return f"collapsed: {share:.1%} of its decisions are the same, {decision}"
    before, after = float(champion.drawdown.mean()), float(challenger.drawdown.mean())
    allowed = _allowed(champion, challenger)
    if after > before + allowed:
        return f"drawdown rose from ${before:.0f} to ${after:.0f}; the limit is ${allowed:.0f} more"
    return None


def more_malformed(champion: Plays, challenger: Plays) -> str | None:
    """Return the reason if the mean share of malformed replies rose too far, sure or not."""
    before, after = float(champion.malformed.mean()), float(challenger.malformed.mean())
    if after <= before + MAX_EXTRA_MALFORMED:
        return None
    return (
        f"malformed replies rose from {before:.1%} to {after:.1%};"
        f" the limit is {MAX_EXTRA_MALFORMED:.0%} more"
    )


def _allowed(champion: Plays, challenger: Plays) -> float:
    """Return the dollars of extra risk that a challenger may take."""
    gain = max(0.0, challenger.mean_pnl - champion.mean_pnl)
    return MAX_EXTRA_RISK * champion.start_balance + gain

"""Payoff of each decision: the trajectory's P&L in dollars, divided among its steps.

A step's payoff is the money that its trade moved, plus the shares that it moved at their final
value. With shares bought ``n_t`` (sold: negative), dollars paid ``c_t`` (received: negative), and
``v`` the final value of a share of that market and side,

    payoff_t = n_t v - c_t          sum over t = (shares left) v - (net dollars paid)

so the payoffs add up to the P&L, however late a game settles: a purchase of the winning side pays
at the step that made it, and a sale pays by how much it was better than to hold. ``v`` is 1 or 0
after the question's resolution, and the price of the last sale before it.

A perpetual is treated alike. With ``H_t`` the P&L of all that is open after step t if it is held to
the end, and ``r_t`` the dollars that the step realised or paid as a fee,

    payoff_t = H_t - H_{t-1} + r_t      sum over t = r_1 + ... + r_T, for nothing is open at the end

so opening pays what holding on would have made, and closing pays by how much it was better than to
hold on. Our game knows the prices to come and records this number (``correctness.payoff``), with
liquidations and closing fees. For other rows, ``H`` is the sum of the open lots at the window's
last price, no lot below the loss of its margin; a closing closes a share of each lot. If the last
price is unknown too, the price of the closing takes its place: the whole P&L is the openers' then.

A step whose trade cannot be matched has the P&L that its own result names. The rest of the P&L
(funding, unknown ends) is divided by the dollars that each step put at stake, or equally if no step
did.

``H`` is a potential (Ng, Harada and Russell 1999) that looks ahead: the end is known, so it needs
no estimate, and the credit is exact (RUDDER, arXiv 1806.07857, redistributes the return in the same
way, with a learnt model of it).

If a payoff or a stake exceeds ``MOST``, the row's numbers contradict each other, and all steps
share its P&L.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple

from babylon.core.llm_calls import object_of
from babylon.core.trajectories import Payoff
from babylon.quality.correctness import Outcomes
from babylon.quality.decode import GameStep
from babylon.quality.traded import (
    CLOSING,
    MOST,
    market_of,
    number,
    number_of,
    side_of,
)

_SIGNS = {"LONG": 1.0, "SHORT": -1.0}
Key = tuple[str, str]  # market and side


def payoffs(
    steps: Sequence[GameStep], outcomes: Outcomes, scenario_id: str, pnl_usd: float
) -> tuple[Payoff, ...]:
    """Return the payoff of each step, in order. They sum to ``pnl_usd``.

    A step whose reply was malformed, or whose action was refused, is marked as failed.
    """
    book = _Book(outcomes, scenario_id)
    for step in steps:
        if step.action.success and (market := market_of(step.action)):
            book.trade(step, market)
    found = book.closed()
    if not all(abs(dollars) <= MOST for dollars in (*found.values(), *book.stakes.values())):
        found.clear()
        book.stakes.clear()
    rest = pnl_usd - fsum(found.values())
    total = fsum(book.stakes.values())
    return tuple(
        Payoff(
            step=(name := step.step_number),
            pnl_usd=found[name] + rest * (book.stakes[name] / total if total else 1 / len(steps)),
            failed=not step.action.success,
        )
        for step in steps
    )


class _Lot(NamedTuple):
    """The part that a step opened and nobody closed, in dollars.

    ``held``: P&L at the window's last price, if known; ``left``: P&L if no step closes it.
    """

    size: float
    held: float | None
    left: float


@dataclass(slots=True)
class _Book:
    """The trades of one trajectory so far.

    ``stakes`` and ``paid``: step → dollars; ``shares``: → step → shares; ``lots``: ticker → step.
    """

    outcomes: Outcomes
    scenario_id: str
    stakes: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    paid: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    shares: dict[Key, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    values: dict[Key, float] = field(default_factory=dict)  # final value of a share
    lots: dict[str, dict[int, _Lot]] = field(default_factory=lambda: defaultdict(dict))

    def trade(self, step: GameStep, market: str) -> None:
        action = step.action
        if side_of(action) in _SIGNS or market in self.lots:
            self._perpetual(step, market)
        elif action.action_type.startswith(CLOSING):
            self._sale(step, market)
        else:
            self._purchase(step, market)

    def _purchase(self, step: GameStep, market: str) -> None:
        shares, dollars = number_of(step.action, "shares"), number_of(step.action, "dollars")
        side = side_of(step.action)
        if not shares or not dollars or side not in ("YES", "NO"):
            return self._realised(step)
        self.paid[step.step_number] += dollars
        self.stakes[step.step_number] += dollars
        self.shares[market, side][step.step_number] = shares
        told = step.action.correctness
        verdict = None if told is None else told.prediction_correct
        if answer := self.outcomes.answer(self.scenario_id, market):
            verdict = answer == side
        if verdict is not None:
            self.values[market, side] = float(verdict)

    def _sale(self, step: GameStep, market: str) -> None:
        shares, dollars = number_of(step.action, "shares"), number_of(step.action, "dollars")
        held = {side: fsum(self.shares.get((market, side), {}).values()) for side in ("YES", "NO")}
        side = side_of(step.action)
        key = (market, side if side in held else max(held, key=held.__getitem__))
        if not shares or not dollars or held[key[1]] < shares * (1 - 1e-9):
            return self._realised(step)  # bought in an earlier window
        self.paid[step.step_number] -= dollars
        self.shares[key][step.step_number] = -shares
        if self.values.get(key) not in (0.0, 1.0):  # the question is not resolved
            self.values[key] = dollars / shares

    def _perpetual(self, step: GameStep, market: str) -> None:
        action = step.action
        closing = action.action_type.startswith(CLOSING)
        size = number_of(action, "size") or number_of(action, "amount")
        if not closing and size:
            self.stakes[step.step_number] += size / (number_of(action, "leverage") or 1.0)
        told = None if action.correctness is None else number(action.correctness.payoff)
        if told is not None:
            self.paid[step.step_number] -= told
        elif closing:
            self._closing(step, market, size)
        elif size:
            self.paid[step.step_number] += number_of(action, "fee") or 0.0
            self.lots[market][step.step_number] = self._lot(step, market, size)

    def _lot(self, step: GameStep, market: str, size: float) -> _Lot:
        action, sign = step.action, _SIGNS.get(side_of(step.action), 0.0)
        margin = size / (number_of(action, "leverage") or 1.0)
        entry = number_of(action, "entryPrice") or number_of(action, "price")
        held = left = None
        if entry and (prices := self.outcomes.start_and_end(self.scenario_id, market)):
            held = max(sign * size * (prices[1] / entry - 1.0), -margin)
        if action.correctness is not None:
            percent = number(action.correctness.price_change)
            left = None if percent is None else sign * size * percent / 100.0
        return _Lot(size, held, left if left is not None else held or 0.0)

    def _closing(self, step: GameStep, market: str, size: float | None) -> None:
        """Close a share of every lot. The step has what that made more than to hold on."""
        lots = self.lots[market]
        total = fsum(lot.size for lot in lots.values())
        if not total > 0:  # opened in an earlier window, or closed down to nothing
            return self._realised(step)
        share = min((size or total) / total, 1.0)
        for opened, lot in [*lots.items()]:
            made = _pnl(step) * lot.size / total
            worth = made if lot.held is None else share * lot.held
            self.paid[opened] -= worth
            self.paid[step.step_number] -= made - worth
            kept = 1.0 - share
            lots[opened] = _Lot(kept * lot.size, lot.held and kept * lot.held, kept * lot.left)
        if share == 1.0:
            lots.clear()

    def _realised(self, step: GameStep) -> None:
        """Give a step the P&L that its own result names."""
        self.paid[step.step_number] -= _pnl(step)

    def closed(self) -> defaultdict[int, float]:
        """Return step → payoff, without what the trades do not explain."""
        found: defaultdict[int, float] = defaultdict(float)
        for step, dollars in self.paid.items():
            found[step] -= dollars
        for key, moved in self.shares.items():
            if key not in self.values:  # unresolved: its dollars come back with the rest
                for step, shares in moved.items():
                    found[step] += self.paid[step] if shares > 0 else 0.0
                continue
            for step, shares in moved.items():
                found[step] += shares * self.values[key]
        for lots in self.lots.values():
            for step, lot in lots.items():
                found[step] += lot.left
        return found


def _pnl(step: GameStep) -> float:
    return number(object_of(step.action.result).get("pnl")) or 0.0

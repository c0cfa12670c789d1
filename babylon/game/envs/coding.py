"""Action codings for algorithms that need one number or one vector.

``menu`` (``Discrete``) lists actions of ``babylon.game.envs.actions``: each verb at half and at the
whole of the largest size, perps with two leverages. ``dials`` (``Box`` within ± 1) has a dial for
each verb, of which the highest is chosen, then one for the size and, with perps, one for the
leverage.
"""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from babylon.core.numeric_manifest import Coding
from babylon.game.envs.actions import LEVERAGES, OF_PERP, OF_QUESTION, SIZES, Action
from babylon.game.market.market import Seat
from babylon.game.market.orders import Decision, Order, OrderKind

MENU_SIZES = (1, 3)  # half and whole, as indices of quarters
MENU_LEVERAGES = (0, 2)  # 1 and 5, as indices of LEVERAGES
WHOLE = SIZES - 1


def code_space(coding: Coding, questions: int, perps: int) -> Discrete | Box:
    """Return the space of the codes of one trader."""
    if coding == "menu":
        return Discrete(len(menu(questions, perps)))
    dials = _verbs(questions, perps) + (2 if perps else 1)
    return Box(-1.0, 1.0, (dials,), np.float32)


@cache
def menu(questions: int, perps: int) -> Action:
    """Return all actions of the menu. [entries, 2 or 3]"""
    none, close, sizes, leverages = (WHOLE,), (0,), MENU_SIZES, MENU_LEVERAGES
    rows: list[tuple[int, ...]] = [(0, WHOLE, 0)]
    verb = 1
    for kind in OF_QUESTION * questions + OF_PERP * perps:
        per: tuple[tuple[int, ...], tuple[int, ...]] = (sizes, leverages)
        if kind is OrderKind.CLOSE:
            per = (none, close)
        elif not kind.is_perp:
            per = (sizes, close)
        rows += [(verb, size, leverage) for size, leverage in product(*per)]
        verb += 1
    return np.array(rows)[:, : 3 if perps else 2]


def decode(coding: Coding, codes: NDArray[Any], questions: int, perps: int) -> Action:
    """Convert codes [...] of the menu, or [..., dials], to actions [..., 2 or 3]."""
    if coding == "menu":
        entries: Action = menu(questions, perps)[codes]
        return entries
    verbs = _verbs(questions, perps)
    steps = [SIZES, len(LEVERAGES)][: codes.shape[-1] - verbs]
    parts = [codes[..., :verbs].argmax(-1)]
    for number, count in enumerate(steps):
        turned = (codes[..., verbs + number] + 1.0) / 2.0 * count
        parts.append(np.clip(turned.astype(np.int64), 0, count - 1))
    return np.stack(parts, -1)


def chosen(coding: Coding, scores: NDArray[Any], questions: int, perps: int) -> Action:
    """Convert a policy's outputs, scores of the menu's entries or dials, to actions."""
    codes = scores.argmax(-1) if coding == "menu" else scores
    return decode(coding, codes, questions, perps)


def encode(coding: Coding, actions: Action, questions: int, perps: int) -> NDArray[Any]:
    """Return the code nearest to each action [..., 2 or 3]: by verb, then size, then leverage."""
    if coding == "menu":
        entries = menu(questions, perps)
        weights = np.array([1000, 10, 1])[: entries.shape[1]]
        apart = (np.abs(actions[..., None, :] - entries) * weights).sum(-1)
        return np.asarray(apart.argmin(-1))
    verbs = _verbs(questions, perps)
    codes = np.full((*actions.shape[:-1], verbs + actions.shape[-1] - 1), -1.0, np.float32)
    np.put_along_axis(codes, actions[..., :1], 1.0, -1)
    for number, count in enumerate([SIZES, len(LEVERAGES)][: actions.shape[-1] - 1]):
        codes[..., verbs + number] = (actions[..., number + 1] + 0.5) / count * 2.0 - 1.0
    return codes


def action_of(seat: Seat, decision: Decision) -> Action:
    """Return the action nearest to a decision in the scalar game; posts and refusals hold."""
    scenario = seat.scenario
    hold = np.array([0, WHOLE, 0])[: 3 if scenario.perps else 2]
    if not isinstance(decision, Order):
        return hold
    kinds, perp = (OF_PERP, True) if decision.kind.is_perp else (OF_QUESTION, False)
    names = (
        [p.ticker for p in scenario.perps] if perp else [q.market_id for q in scenario.questions]
    )
    if decision.market not in names:
        return hold
    before = len(OF_QUESTION) * len(scenario.questions) if perp else 0
    verb = 1 + before + len(kinds) * names.index(decision.market) + kinds.index(decision.kind)
    leverage = int(np.abs(LEVERAGES - decision.leverage).argmin())
    quarters = round(SIZES * _share(seat, decision))
    return np.array([verb, min(max(quarters, 1), SIZES) - 1, leverage])[: len(hold)]


def _share(seat: Seat, order: Order) -> float:
    """Return an order's share of the largest one that the seat could give."""
    rules = seat.scenario.rules
    if order.kind is OrderKind.CLOSE:
        return 1.0
    if order.kind is OrderKind.SELL:
        held = [h.shares for (market, _), h in seat.holdings.items() if market == order.market]
        most, cost = max(held, default=0.0), order.amount
    else:
        most, cost = min(rules.max_order, seat.balance), order.amount
        if order.kind.is_perp:
            cost *= 1.0 / max(1.0, order.leverage) + rules.fee
    return min(cost / most, 1.0) if most > 0.0 else 1.0  # a reply may ask for 1e308 dollars


def _verbs(questions: int, perps: int) -> int:
    return 1 + len(OF_QUESTION) * questions + len(OF_PERP) * perps

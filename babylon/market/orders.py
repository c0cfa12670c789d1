"""What an agent may decide in a tick, and the JSON it is written in.

``{"action":"trade","trade":{"type":"prediction","market":"m1","action":"buy_yes","amount":50}}``
or ``{"action":"hold"}``. A reply that is anything else is a failed action with an error, as in
the live game; it never raises.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Literal

import msgspec

MAX_REPLY_TOKENS = 128  # more than any decision needs; the same in play and in the arena


class OrderKind(StrEnum):
    BUY_YES = "buy_yes"
    BUY_NO = "buy_no"
    SELL = "sell"


@dataclass(frozen=True, slots=True)
class Order:
    """Buy for ``amount`` dollars, or sell ``amount`` shares."""

    market: str
    kind: OrderKind
    amount: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing; ``error`` is set when nothing is done because the reply was malformed."""

    error: str | None = None


Decision = Order | Hold


class _Trade(msgspec.Struct):
    type: Literal["prediction"]
    market: str
    action: OrderKind
    amount: float
    reasoning: str = ""


class _Reply(msgspec.Struct):
    action: Literal["trade", "hold"]
    trade: _Trade | None = None
    reasoning: str = ""


_DECODER = msgspec.json.Decoder(_Reply)


def render_decision(decision: Decision) -> str:
    """The reply that means a decision."""
    if isinstance(decision, Hold):
        return '{"action":"hold"}'
    return (
        f'{{"action":"trade","trade":{{"type":"prediction","market":"{decision.market}",'
        f'"action":"{decision.kind.value}","amount":{decision.amount:g}}}}}'
    )


def parse_decision(reply: str) -> Decision:
    """The decision in a reply; a malformed one holds and says what was wrong with it."""
    try:
        decoded = _DECODER.decode(reply)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        return Hold(error=f"malformed reply: {error}")
    if decoded.action == "hold":
        return Hold()
    if decoded.trade is None:
        return Hold(error="malformed reply: action is trade, but trade is missing")
    trade = decoded.trade
    if not (isfinite(trade.amount) and trade.amount > 0):
        return Hold(error=f"amount {trade.amount:g} is not a positive number")
    return Order(trade.market, trade.action, trade.amount)

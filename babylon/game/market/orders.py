"""Decisions of an agent, and their JSON.

``{"action":"trade","trade":{"type":"prediction","market":"m1","action":"buy_yes","amount":50}}``,
``{"action":"trade","trade":{"type":"perp","market":"OPNAI","action":"open_long","amount":200,
"leverage":5}}``, ``{"action":"post","content":"…"}``,
``{"action":"comment","post":"p3","content":"…"}`` or ``{"action":"hold"}``. Any other reply is a
failed action with an error, as in the live game; parsing never raises. The market decides whether a
well-formed order can be carried out.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Literal

import msgspec

MAX_REPLY_TOKENS = 128  # more than any decision needs; used in play and in the arena


class OrderKind(StrEnum):
    BUY_YES = "buy_yes"
    BUY_NO = "buy_no"
    SELL = "sell"
    OPEN_LONG = "open_long"
    OPEN_SHORT = "open_short"
    CLOSE = "close"

    @property
    def is_perp(self) -> bool:
        return self in (OrderKind.OPEN_LONG, OrderKind.OPEN_SHORT, OrderKind.CLOSE)


@dataclass(frozen=True, slots=True)
class Order:
    """A trade.

    ``amount`` is in dollars for a purchase, in shares for a sale, and in dollars of notional for
    opening a perp, with a margin of ``amount / leverage``. Closing ignores it: the whole position
    is closed.
    """

    market: str
    kind: OrderKind
    amount: float
    leverage: float = 1.0


@dataclass(frozen=True, slots=True)
class Post:
    """A post on the feed."""

    content: str


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment on a post of the feed."""

    post: str
    content: str


@dataclass(frozen=True, slots=True)
class Hold:
    """No action. ``error`` is set if the reply was malformed."""

    error: str | None = None


Decision = Order | Post | Comment | Hold


class _Trade(msgspec.Struct):
    type: Literal["prediction", "perp"]
    market: str
    action: OrderKind
    amount: float | None = None
    leverage: float = 1.0
    reasoning: str = ""


class _Reply(msgspec.Struct):
    action: Literal["trade", "hold", "post", "comment"]
    trade: _Trade | None = None
    post: str | None = None
    content: str | None = None
    reasoning: str = ""


_DECODER = msgspec.json.Decoder(_Reply)


def render_decision(decision: Decision) -> str:
    """Return the JSON reply of a decision."""
    match decision:
        case Hold():
            return '{"action":"hold"}'
        case Post(content):
            return f'{{"action":"post","content":{json.dumps(content)}}}'
        case Comment(post, content):
            return (
                f'{{"action":"comment","post":{json.dumps(post)},"content":{json.dumps(content)}}}'
            )
        case Order(market, kind, amount, leverage):
            # With six digits, the largest order could be rounded up to one that is refused.
            more = f',"leverage":{leverage:g}' if kind.is_perp and leverage != 1.0 else ""
            return (
                f'{{"action":"trade","trade":{{"type":"{"perp" if kind.is_perp else "prediction"}",'
                f'"market":"{market}","action":"{kind.value}","amount":{amount:.12g}{more}}}}}'
            )


def parse_decision(reply: str) -> Decision:
    """Return the decision in a reply; ``Hold`` with an error if the reply is malformed."""
    try:
        decoded = _DECODER.decode(reply)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        return _malformed(str(error))
    match decoded:
        case _Reply(action="hold"):
            return Hold()
        case _Reply(action="trade", trade=_Trade() as trade):
            return _order(trade)
        case _Reply(action="post", content=str(content)):
            return Post(content)
        case _Reply(action="comment", post=str(post), content=str(content)):
            return Comment(post, content)
    needed = {"trade": "trade", "post": "content", "comment": "post or content"}[decoded.action]
    return _malformed(f"action is {decoded.action}, but {needed} is missing")


def _order(trade: _Trade) -> Decision:
    if (trade.type == "perp") is not trade.action.is_perp:
        return _malformed(f"{trade.action} is no action of type {trade.type}")
    if trade.action is OrderKind.CLOSE:
        return Order(trade.market, trade.action, trade.amount or 0.0)
    if trade.amount is None:
        return _malformed("amount is missing")
    if not (isfinite(trade.amount) and trade.amount > 0):
        return Hold(error=f"amount {trade.amount:g} is not a positive number")
    return Order(trade.market, trade.action, trade.amount, trade.leverage)


def _malformed(what: str) -> Hold:
    return Hold(error=f"malformed reply: {what}")

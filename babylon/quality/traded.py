"""Readers of a trade's free-form ``parameters`` and ``result``."""

from babylon.core.llm_calls import object_of
from babylon.quality.decode import GameAction

OPENING, CLOSING, DECISION = ("BUY", "OPEN"), ("SELL", "CLOSE"), "TRADING_DECISION"
MOST = 1e12  # dollars or shares; a larger number is a fault, and would drown those of other rows


def market_of(action: GameAction) -> str | None:
    """Return the question's or perpetual's name."""
    return market_in(action.parameters)


def market_in(parameters: object) -> str | None:
    """Return the name of the question or perpetual that an action's parameters hold."""
    known = object_of(parameters)
    name = known.get("marketId") or known.get("ticker")
    return name if isinstance(name, str) else None


def side_of(action: GameAction) -> str:
    """Return ``YES``, ``NO``, ``LONG``, ``SHORT``, or what else the action names."""
    parameters = object_of(action.parameters)
    return str(parameters.get("side") or parameters.get("outcome")).upper()


def number_of(action: GameAction, key: str) -> float | None:
    """Return a positive number of the result, else of the parameters that were asked for."""
    result, parameters = object_of(action.result), object_of(action.parameters)
    return positive(result.get(key)) or positive(parameters.get(key))


def positive(value: object) -> float | None:
    """Return a number above zero and of at most ``MOST``, else ``None``."""
    found = number(value)
    return found if found is not None and found > 0 else None


def number(value: object) -> float | None:
    """Return a number of at most ``MOST`` in size, else ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MOST else None  # NaN compares false

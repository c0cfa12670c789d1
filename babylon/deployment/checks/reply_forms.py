"""The form of a reply, and a test for more malformed replies than chance allows.

The champion's own replies set the form: an order of the game, any JSON, or text that ends by
itself. This finds a policy that forgot its format, or never stops, on any prompts.
"""

from math import comb
from typing import Literal

import msgspec

from babylon.game.market.orders import Hold, parse_decision

Form = Literal["order", "json", "text"]
ALPHA = 0.01  # share of good policies that chance refuses


def form_of(reply: str) -> Form:
    """Return the strictest form that a reply has."""
    forms: tuple[Form, ...] = ("order", "json")
    return next((form for form in forms if has_form(reply, form)), "text")


def has_form(reply: str, form: Form) -> bool:
    """Return true if a reply that was not cut off has a form."""
    match form:
        case "order":
            decision = parse_decision(reply)
            return not (isinstance(decision, Hold) and decision.error)
        case "json":
            try:
                return isinstance(msgspec.json.decode(reply), dict | list)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
                return False
        case "text":
            return bool(reply.strip())


def chance_of_more(bad: int, of: int, champions_bad: int, champions_of: int) -> float:
    """Fisher's exact test, one-sided: the probability of at least ``bad`` malformed replies when
    policy and champion give them equally often.

    For a given total of bad replies, the policy's number of them is hypergeometric (R. A. Fisher
    1935, "The logic of inductive inference"). Similar replies to one prompt make the test milder,
    never stricter.
    """
    all_bad, everything = bad + champions_bad, of + champions_of
    ways = sum(
        comb(all_bad, number) * comb(everything - all_bad, of - number)
        for number in range(bad, min(all_bad, of) + 1)
    )
    return ways / comb(everything, of)

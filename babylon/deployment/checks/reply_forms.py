"""Is a reply of the form that is wanted? And are more replies malformed than chance allows?

What is wanted is what the champion gives: an order of the game, any JSON, or just text that ends
by itself. So a policy that forgets its format, or that never stops, is noticed on any prompts.
"""

from math import comb
from typing import Literal

import msgspec

from babylon.game.market.orders import Hold, parse_decision

Form = Literal["order", "json", "text"]
ALPHA = 0.01  # share of good policies that bad luck may cost


def form_of(reply: str) -> Form:
    """The strictest form that a reply has."""
    forms: tuple[Form, ...] = ("order", "json")
    return next((form for form in forms if has_form(reply, form)), "text")


def has_form(reply: str, form: Form) -> bool:
    """Whether a whole reply (one that was not cut) is of a form."""
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
    """Fisher's exact test, one-sided: the probability that so many or more of the bad replies fall
    to the policy when both give bad ones as often.

    With the total of bad replies given, the policy's share of them is hypergeometric
    (R. A. Fisher 1935, "The logic of inductive inference"). Replies to one prompt that are alike
    make the test milder, never stricter.
    """
    all_bad, everything = bad + champions_bad, of + champions_of
    ways = sum(
        comb(all_bad, number) * comb(everything - all_bad, of - number)
        for number in range(bad, min(all_bad, of) + 1)
    )
    return ways / comb(everything, of)

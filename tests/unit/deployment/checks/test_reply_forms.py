"""The form of a reply, and the chance of more malformed ones."""

import itertools
from math import comb

import pytest

from babylon.deployment.checks.reply_forms import ALPHA, Form, chance_of_more, form_of, has_form


@pytest.mark.parametrize(
    ("reply", "form"),
    [
        ('{"action":"hold"}', "order"),
        ('{"action":"trade","trade":{"type":"prediction","market":"m1","action":"sell","amount":1}}',
         "order"),
        ('{"action":"dance"}', "json"),
        ("[1, 2]", "json"),
        ("42", "text"),
        ('{"action":"hold"', "text"),
        ("\ud800", "text"),
    ],
)  # fmt: skip
def test_a_reply_has_the_strictest_form_that_fits(reply: str, form: Form) -> None:
    assert form_of(reply) == form


def test_an_order_is_json_and_json_is_text_but_silence_is_nothing() -> None:
    assert all(has_form('{"action":"hold"}', form) for form in ("order", "json", "text"))
    assert not has_form(" \n", "text")


def test_the_chance_is_that_of_drawing_the_bad_replies_by_lot() -> None:
    """Counted out: of 7 replies 3 are bad; the policy has 4 of them, at least 2 of which bad."""
    replies = [True] * 3 + [False] * 4
    hands = list(itertools.combinations(range(7), 4))
    often = sum(sum(replies[index] for index in hand) >= 2 for hand in hands)
    assert chance_of_more(2, 4, 1, 3) == pytest.approx(often / len(hands))
    assert chance_of_more(0, 4, 3, 3) == 1.0


def test_it_takes_seven_malformed_replies_of_64_beside_a_flawless_champion() -> None:
    assert chance_of_more(6, 64, 0, 64) > ALPHA > chance_of_more(7, 64, 0, 64)
    assert chance_of_more(7, 64, 0, 64) == pytest.approx(comb(64, 7) / comb(128, 7))


def test_two_equally_careless_policies_are_told_apart_less_often_than_alpha() -> None:
    """Exactly, by enumeration: 16 replies each, 20 % malformed; the test is conservative."""
    rate, of = 0.2, 16
    odds = [comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(of + 1)]
    refused = sum(
        odds[bad] * odds[champions]
        for bad in range(of + 1)
        for champions in range(of + 1)
        if chance_of_more(bad, of, champions, of) < ALPHA
    )
    assert 0 < refused < ALPHA

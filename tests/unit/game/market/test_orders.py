import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.game.market.orders import (
    Comment,
    Decision,
    Hold,
    Order,
    OrderKind,
    Post,
    parse_decision,
    render_decision,
)

BUY = '"type":"prediction","market":"m1","action":"buy_yes"'
LONG = '"type":"perp","market":"OPNAI","action":"open_long"'


def trade(fields: str) -> str:
    return f'{{"action":"trade","trade":{{{fields}}}}}'


@given(st.text())
def test_any_reply_is_a_decision(reply: str) -> None:
    decision = parse_decision(reply)
    malformed = isinstance(decision, Hold) and decision.error is not None
    assert malformed or parse_decision(render_decision(decision)) == decision


@pytest.mark.parametrize(
    "decision",
    [
        *[Order("m2", kind, 50) for kind in OrderKind],
        Order("OPNAI", OrderKind.OPEN_SHORT, 200, 12.5),
        Order("OPNAI", OrderKind.OPEN_LONG, 13636.36, 100),  # the largest order of the full hour
        Post('up "only"\n\u00fc'),
        Comment("p3", "really?"),
        Hold(),
    ],
)
def test_a_decision_survives_its_reply(decision: Decision) -> None:
    assert parse_decision(render_decision(decision)) == decision


@pytest.mark.parametrize("amount", ["1e999", "-5", "0", "NaN", '"5"', "null"])
@pytest.mark.parametrize("order", [BUY, LONG])
def test_an_amount_must_be_a_positive_number(order: str, amount: str) -> None:
    decision = parse_decision(trade(f'{order},"amount":{amount}'))
    assert isinstance(decision, Hold) and decision.error


def test_an_order_without_leverage_has_none() -> None:
    assert parse_decision(trade(f'{LONG},"amount":50')) == Order("OPNAI", OrderKind.OPEN_LONG, 50)


def test_closing_needs_no_amount() -> None:
    reply = trade('"type":"perp","market":"OPNAI","action":"close"')
    assert parse_decision(reply) == Order("OPNAI", OrderKind.CLOSE, 0)


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ('{"action":"trade"}', "trade is missing"),
        ('{"action":"post"}', "content is missing"),
        ('{"action":"comment","content":"x"}', "post or content is missing"),
        ('{"action":"comment","post":"p1"}', "post or content is missing"),
        ('{"action":"dance"}', "Invalid enum value 'dance'"),
        (trade(BUY), "amount is missing"),
        (trade(f'{BUY.replace("prediction", "perp")},"amount":5'), "no action of type perp"),
        (trade(f'{LONG.replace("perp", "prediction")},"amount":5'), "no action of type prediction"),
        (trade(f'{LONG},"amount":5,"leverage":"high"'), "Expected `float`"),
        ("I would buy m1", "JSON is malformed"),
        ("", "truncated"),
    ],
)
def test_a_malformed_reply_says_what_is_wrong(reply: str, complaint: str) -> None:
    decision = parse_decision(reply)
    assert isinstance(decision, Hold)
    assert decision.error and decision.error.startswith("malformed reply: ")
    assert complaint in decision.error

from itertools import islice

from babylon.game.market.levels import LEVELS
from babylon.game.market.orders import Hold, Order, OrderKind, parse_decision
from babylon.game.market.scenario import HOUR
from babylon.game.market.transcripts import TABLES, varied_choices

WORLDS = [HOUR, LEVELS["L1"].rules(0), HOUR, LEVELS["L2"].rules(0)]


def test_prompts_are_of_other_games_in_turn_and_all_their_replies_are_well_formed() -> None:
    found = [*islice(varied_choices(0, WORLDS, 4), 4 * TABLES)]
    openings = {one.prompt[1]["content"].split("It is ")[0] for one in found[:TABLES]}
    assert len(openings) > 0.9 * TABLES  # other questions and perps
    assert len({one.prompt[0]["content"] for one in found}) == 3  # three sets of rules
    assert {len(one.replies) for one in found} == {4}
    assert any(len({*one.replies}) > 2 for one in found)  # of other agents
    decisions = [parse_decision(reply) for one in found for reply in one.replies]
    assert not [one for one in decisions if isinstance(one, Hold) and one.error]
    orders = [one for one in decisions if isinstance(one, Order)]
    assert {one.kind for one in orders} == {*OrderKind}
    assert len({one.amount for one in orders}) < 40 < len({one.market for one in orders}) * 4
    assert [*islice(varied_choices(0, WORLDS, 4), 3)] == found[:3]
    assert next(varied_choices(1, WORLDS, 4)) != found[0]

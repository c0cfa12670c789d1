from itertools import islice

from babylon.game.market.levels import LEVELS
from babylon.game.market.orders import Hold, parse_decision
from babylon.game.market.scenario import HOUR
from babylon.game.market.transcripts import TABLES, varied_chats

WORLDS = [HOUR, LEVELS["L1"].rules(0), HOUR, LEVELS["L2"].rules(0)]


def test_varied_chats_are_of_other_games_in_turn_and_all_replies_are_well_formed() -> None:
    chats = [*islice(varied_chats(0, WORLDS), 4 * TABLES)]
    openings = {chat[1]["content"].split("It is ")[0] for chat in chats[:TABLES]}
    assert len(openings) > 0.9 * TABLES  # other questions and perps
    assert len({chat[0]["content"] for chat in chats}) == 3  # three sets of rules
    decisions = [parse_decision(chat[2]["content"]) for chat in chats]
    assert not [one for one in decisions if isinstance(one, Hold) and one.error]
    assert len({type(one) for one in decisions}) == 4  # order, hold, post, comment
    assert [*islice(varied_chats(0, WORLDS), 3)] == chats[:3]
    assert next(varied_chats(1, WORLDS)) != chats[0]

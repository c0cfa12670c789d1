"""A fleet's rows from before fleets noted the market: what stands in the prompts themselves.

The small game's prompt names the questions, the news and the YES prices to two decimals. Prices are
an agent's own: its orders are in them, and they are rounded. The median over the agents is the path
to which the crowd moves the price in each tick. That is near to what happened and not the same, so
the scenario is marked ``seen``, and says in ``missing`` what had to be taken from elsewhere.
"""

import re
from collections.abc import Sequence
from statistics import median

from babylon.core.errors import ReplayError
from babylon.dataset.replay.rebuild import outcome_of, recorded_play
from babylon.dataset.replay.recorded import RecordedRow, RecordedScenario
from babylon.game.market.amm import Side
from babylon.game.market.scenario import STARTER, News, Question, Rules, Scenario
from babylon.game.market.words import NEWS

_QUESTION = re.compile(r"^(m\d+) (.+\?)$", re.MULTILINE)
_NEWS = re.compile(r"^News on (m\d+): (.+)\.$", re.MULTILINE)
_PRICES = re.compile(r"^YES prices: (.+)$", re.MULTILINE)
_PRICE = re.compile(r"(m\d+) ([01]\.\d\d)")
_HINTS = {words: side for side, choice in NEWS.items() for words in choice}
_LOWEST, _HIGHEST = 0.005, 0.995  # what 0.00 and 1.00 may stand for at most
MISSING = (
    "prices: to two decimals, as agents saw them with their own orders in them",
    "rules: fee and largest order are those of the small game",
)


def tells_prices(row: RecordedRow) -> bool:
    """Is there a price line in the first prompt?"""
    return _PRICES.search(row.steps[0].prompt) is not None


def rebuild_from_prompts(rows: Sequence[RecordedRow]) -> RecordedScenario:
    """The scenario as its agents were told of it.

    Raises:
        ReplayError: the prompts differ in what they must share, or an outcome is not recorded.
    """
    first = rows[0]
    prompts = [[step.prompt for step in row.steps] for row in rows]
    ticks = len(prompts[0])
    questions = _QUESTION.findall(prompts[0][0])
    if any(len(own) != ticks or _QUESTION.findall(own[0]) != questions for own in prompts):
        raise ReplayError(
            f"scenario {first.scenario_id}: its agents were shown other questions, or played for"
            " other times: they did not play in one scenario"
        )
    seen = [[dict(_prices(first, prompt)) for prompt in own] for own in prompts]
    missing = list(MISSING)
    news = [_news(prompt) for prompt in prompts[0]]
    if None in news:
        missing.append(f"news: what {news.count(None)} headlines suggest is not known")
    return RecordedScenario(
        window_id=first.window_id,
        scenario=Scenario(
            scenario_id=first.scenario_id,
            rules=_rules(first, len(questions), ticks),
            questions=tuple(
                Question(name, text, outcome_of(first, name), None, _path(first, name, seen))
                for name, text in questions
            ),
            news=tuple(news),
            noise=(None,) * ticks,
            start_minute=first.start.hour * 60 + first.start.minute,
        ),
        plays=tuple(recorded_play(row) for row in rows),
        prices="seen",
        missing=tuple(missing),
    )


def _rules(row: RecordedRow, markets: int, ticks: int) -> Rules:
    balance = row.steps[0].environment_state.agent_balance
    return Rules(
        markets=markets,
        ticks=ticks,
        start_balance=balance,
        max_order=STARTER.max_order,
        fee=STARTER.fee,
    )


def _prices(row: RecordedRow, prompt: str) -> list[tuple[str, float]]:
    line = _PRICES.search(prompt)
    if line is None:
        raise ReplayError(f"trajectory {row.trajectory_id}: a prompt has no YES prices")
    return [(name, float(price)) for name, price in _PRICE.findall(line[1])]


def _path(row: RecordedRow, market: str, seen: list[list[dict[str, float]]]) -> tuple[float, ...]:
    try:
        path = [median(tick[market] for tick in ticks) for ticks in zip(*seen, strict=True)]
    except KeyError as error:
        raise ReplayError(f"scenario {row.scenario_id}: {market} has no price in a tick") from error
    return tuple(min(max(price, _LOWEST), _HIGHEST) for price in path)


def _news(prompt: str) -> News | None:
    line = _NEWS.search(prompt)
    hints: Side | None = _HINTS.get(line[2]) if line else None
    return News(line[1], line[2], hints) if line and hints else None

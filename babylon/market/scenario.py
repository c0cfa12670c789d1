"""What a scenario *is*: questions, how they will resolve, the news and the background orders.

All of it follows from one seed, so that two policies can be compared on the same world (common
random numbers). Outcomes are ground truth: agents see the questions, the prices and the news.
"""

from dataclasses import dataclass
from random import Random

from babylon.market.amm import Side

COMPANIES = ("OpnAI", "TeslAI", "Nvidiot", "Macrohard", "Gaggle", "Amazen", "Mettle", "Appel")
EVENTS = ("ship", "win the vote", "beat estimates", "get approval", "sign the deal", "cut prices")
GOOD_NEWS = (
    "insiders confirm it",
    "sources expect success",
    "officials are positive",
    "a leak says yes",
    "the team celebrates early",
    "analysts raise the odds",
)
BAD_NEWS = (
    "insiders deny it",
    "sources expect failure",
    "officials are negative",
    "a leak says no",
    "the team cancels the party",
    "analysts cut the odds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Size and difficulty of a scenario. Dollars, and ticks of play in which agents may act."""

    markets: int = 3
    ticks: int = 6
    start_balance: float = 1000.0
    max_order: float = 150.0
    fee: float = 0.001
    news_reliability: float = 0.95  # P(news agrees with the outcome)
    noise_order: float = 60.0  # largest background order, one a tick


@dataclass(frozen=True, slots=True)
class Question:
    """One prediction market. ``outcome`` is ground truth."""

    market_id: str
    text: str
    outcome: Side


@dataclass(frozen=True, slots=True)
class News:
    """A headline about one market, published just before agents act in a tick."""

    market_id: str
    text: str
    hints: Side  # which outcome the words suggest; wrong with probability 1 - reliability


@dataclass(frozen=True, slots=True)
class NoiseOrder:
    """A background order that moves the price before agents act in a tick."""

    market_id: str
    side: Side
    dollars: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seeded world. ``news`` and ``noise`` hold one entry a tick."""

    scenario_id: str
    rules: Rules
    questions: tuple[Question, ...]
    news: tuple[News, ...]
    noise: tuple[NoiseOrder, ...]

    def question(self, market_id: str) -> Question | None:
        return next((q for q in self.questions if q.market_id == market_id), None)


def make_scenario(seed: int | str, rules: Rules | None = None, *, name: str = "") -> Scenario:
    """The world of a seed. ``name`` becomes the scenario id (default ``scenario-<seed>``)."""
    rules = rules or Rules()
    random = Random(f"scenario:{seed}")
    companies = random.sample(COMPANIES, rules.markets)
    questions = tuple(
        Question(
            f"m{index + 1}", f"Will {company} {random.choice(EVENTS)}?", random.choice([*Side])
        )
        for index, company in enumerate(companies)
    )
    return Scenario(
        scenario_id=name or f"scenario-{seed}",
        rules=rules,
        questions=questions,
        news=tuple(
            _news(random, question, rules) for question in _schedule(random, questions, rules)
        ),
        noise=tuple(
            NoiseOrder(
                random.choice(questions).market_id,
                random.choice([*Side]),
                random.uniform(0.0, rules.noise_order),
            )
            for _ in range(rules.ticks)
        ),
    )


def _schedule(random: Random, questions: tuple[Question, ...], rules: Rules) -> list[Question]:
    """Which question each tick's news is about: every question equally often, in random order."""
    repeated = [questions[tick % len(questions)] for tick in range(rules.ticks)]
    random.shuffle(repeated)
    return repeated


def _news(random: Random, question: Question, rules: Rules) -> News:
    truthful = random.random() < rules.news_reliability
    hints = question.outcome if truthful else question.outcome.other
    words = random.choice(GOOD_NEWS if hints is Side.YES else BAD_NEWS)
    return News(question.market_id, words, hints)

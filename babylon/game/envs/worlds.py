"""Scenarios as arrays for the vectorised core."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from babylon.game.market.amm import Side
from babylon.game.market.perps import FUNDING_MINUTES
from babylon.game.market.scenario import Rules, Scenario

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worlds:
    """W scenarios of the same rules. T ticks, M questions, P perps, N traders.

    ``news`` has one column per topic (questions, then perps): 1 if the tick's headline is good for
    it (YES, or up), -1 if it is bad, else 0.
    """

    rules: Rules
    outcome: Ints  # [W, M] the winning side: 0 is YES, 1 is NO. Ground truth
    resolves_at: Ints  # [W, M]

    noise_market: Ints  # [W, T] -1: no order
    noise_side: Ints  # [W, T]
    noise_dollars: Floats  # [W, T]
    news: Floats  # [W, T + 1, M + P]
    told: Floats  # [W, T + 1, M + P] cumulative sum of ``news``
    price: Floats  # [W, T + 1, P] dollars
    funding_rate: Floats  # [W, P]
    to_funding: Ints  # [W, T + 1] minutes until the next funding; FUNDING_MINUTES: paid now
    turns: Ints  # [W, T, N] the traders in the order in which their decisions are carried out

    @property
    def count(self) -> int:
        return int(self.outcome.shape[0])

    @property
    def questions(self) -> int:
        return int(self.outcome.shape[1])

    @property
    def perps(self) -> int:
        return int(self.price.shape[2])

    @property
    def traders(self) -> int:
        return int(self.turns.shape[2])


def from_scenarios(scenarios: Sequence[Scenario], traders: int = 1) -> Worlds:
    """Convert scenarios to arrays, each with its own market of ``traders``.

    Raises:
        ValueError: The list is empty, or the scenarios differ in rules or size.
    """
    _check(scenarios)
    rules = scenarios[0].rules
    news = np.array([_news(scenario) for scenario in scenarios])
    noise = np.array([_noise(scenario) for scenario in scenarios])
    return Worlds(
        rules=rules,
        outcome=_ints([[_side(q.outcome) for q in s.questions] for s in scenarios]),
        resolves_at=_ints([[q.end(rules) for q in s.questions] for s in scenarios]),
        noise_market=noise[..., 0].astype(np.int64),
        noise_side=noise[..., 1].astype(np.int64),
        noise_dollars=noise[..., 2],
        news=news,
        told=news.cumsum(1),
        price=np.array([_prices(scenario) for scenario in scenarios]),
        funding_rate=np.array(
            [[perp.funding_rate for perp in s.perps] for s in scenarios], dtype=np.float64
        ),
        to_funding=np.array([_to_funding(scenario) for scenario in scenarios]),
        turns=np.array([_turns(scenario, traders) for scenario in scenarios]),
    )


def topics(scenario: Scenario) -> list[str]:
    """Return the topics of news: market ids, then tickers."""
    return [q.market_id for q in scenario.questions] + [p.ticker for p in scenario.perps]


def _check(scenarios: Sequence[Scenario]) -> None:
    if not scenarios:
        raise ValueError("no scenarios: give at least one")
    first = scenarios[0]
    for scenario in scenarios:
        sizes = [(s.rules, len(s.questions), len(s.perps)) for s in (first, scenario)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{scenario.scenario_id} and {first.scenario_id} differ in rules or size:"
                f" {sizes[1]} and {sizes[0]}; all must be equal"
            )


def _ints(values: list[list[int]]) -> Ints:
    return np.array(values, dtype=np.int64)


def _side(side: Side) -> int:
    return 0 if side is Side.YES else 1


def _noise(scenario: Scenario) -> Floats:
    """Return market, side and dollars of every tick's order. [T, 3]"""
    names = topics(scenario)
    orders = np.zeros((scenario.rules.ticks, 3))
    orders[:, 0] = -1.0
    for tick, order in enumerate(scenario.noise):
        if order is not None:
            orders[tick] = names.index(order.market_id), _side(order.side), order.dollars
    return orders


def _news(scenario: Scenario) -> Floats:
    names = topics(scenario)
    news = np.zeros((scenario.rules.ticks + 1, len(names)))
    for tick, item in enumerate(scenario.news):
        if item is not None:
            news[tick, names.index(item.market_id)] = 1.0 if item.hints is Side.YES else -1.0
    return news


def _prices(scenario: Scenario) -> Floats:
    ticks = scenario.rules.ticks
    paths = [perp.prices[: ticks + 1] for perp in scenario.perps]
    return np.array(paths).reshape(len(paths), ticks + 1).T


def _to_funding(scenario: Scenario) -> Ints:
    minutes = scenario.start_minute + np.arange(scenario.rules.ticks + 1)
    return FUNDING_MINUTES - minutes % FUNDING_MINUTES


def _turns(scenario: Scenario, traders: int) -> Ints:
    """Return the order of the traders in every tick, as ``Market`` draws it. [T, N]"""
    orders = [list(range(traders)) for _ in range(scenario.rules.ticks)]
    for tick, order in enumerate(orders if traders > 1 else ()):
        Random(f"order:{scenario.scenario_id}:{tick}").shuffle(order)
    return np.array(orders)

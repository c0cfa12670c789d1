"""Observations as feature vectors.

A row holds the trader's features, then each question feature for all questions, then each perp
feature for all perps, in the order of ``feature_names``. Most values lie within ± 1. Money is in
units of the start balance. News is 1 for a good headline and -1 for a bad one. A resolved question
has the price 1 or 0. No feature reveals an outcome before its question resolves, or a future
price. The feed is text only and is left out.
"""

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from babylon.game.envs.ledger import Ledger
from babylon.game.envs.worlds import Floats, Worlds
from babylon.game.market.perps import FUNDING_MINUTES

Observation = NDArray[np.float32]
BOUND = 1000.0  # features are clipped to ± BOUND
TRADER = ("share of the ticks left", "share of the time to funding", "balance", "equity")
QUESTION = (
    "P(YES)",
    "open",
    "share of the ticks until it resolves",
    "news",
    "news so far",
    "YES shares",
    "NO shares",
)
PERP = (
    "price since the start, percent",
    "last move, percent",
    "funding rate, percent",
    "news",
    "news so far",
    "long size",
    "short size",
    "margin",
    "profit",
)


def feature_names(questions: int, perps: int) -> list[str]:
    """Return the name of every column of an observation."""
    return [
        *TRADER,
        *(f"m{number}: {name}" for name in QUESTION for number in range(1, questions + 1)),
        *(f"perp {number}: {name}" for name in PERP for number in range(1, perps + 1)),
    ]


def observation_space(questions: int, perps: int) -> Space[Observation]:
    """Return the observation space: ``Box`` [4 + 7 questions + 9 perps], float32."""
    return Box(-BOUND, BOUND, (len(feature_names(questions, perps)),), np.float32)


def observe(ledger: Ledger, worlds: Worlds, equity: Floats) -> Observation:
    """Return all traders' observations [B, N, features]; ``equity`` [B, N] in dollars."""
    blocks = [
        *_trader(ledger, worlds, equity),
        *_questions(ledger, worlds),
        *(_perps(ledger, worlds) if worlds.perps else ()),
    ]
    width = sum(block.shape[-1] for block in blocks)
    observation = np.empty((*ledger.balance.shape, width), dtype=np.float32)
    column = 0
    for block in blocks:
        observation[..., column : column + block.shape[-1]] = block
        column += block.shape[-1]
    return np.clip(observation, -BOUND, BOUND, out=observation)


def _trader(ledger: Ledger, worlds: Worlds, equity: Floats) -> list[Floats]:
    left = 1.0 - ledger.tick / worlds.rules.ticks
    to_funding = worlds.to_funding[ledger.world, ledger.tick] / FUNDING_MINUTES
    start = worlds.rules.start_balance
    return [
        left[:, None, None],
        to_funding[:, None, None],
        ledger.balance[..., None] / start,
        equity[..., None] / start,
    ]


def _questions(ledger: Ledger, worlds: Worlds) -> list[Floats]:
    reserves, resolved = ledger.reserves, 1.0 - worlds.outcome[ledger.world]
    price = np.where(ledger.open, reserves[..., 1] / reserves.sum(-1), resolved)
    left = np.maximum(0, worlds.resolves_at[ledger.world] - ledger.tick[:, None])
    shares = ledger.shares / worlds.rules.start_balance
    news, told = _news(ledger, worlds, slice(worlds.questions))
    return [
        price[:, None],
        ledger.open[:, None],
        left[:, None] / worlds.rules.ticks,
        news,
        told,
        shares[..., 0],
        shares[..., 1],
    ]


def _perps(ledger: Ledger, worlds: Worlds) -> list[Floats]:
    world, tick = ledger.world, ledger.tick
    price = worlds.price[world, tick]
    start = worlds.rules.start_balance
    size = ledger.size / start
    news, told = _news(ledger, worlds, slice(worlds.questions, None))
    return [
        100.0 * (price / worlds.price[world, 0] - 1.0)[:, None],
        100.0 * (price / worlds.price[world, np.maximum(0, tick - 1)] - 1.0)[:, None],
        100.0 * worlds.funding_rate[world, None],
        news,
        told,
        size[..., 0],
        size[..., 1],
        ledger.margin.sum(-1) / start,
        ledger.profit(price).sum(-1) / start,
    ]


def _news(ledger: Ledger, worlds: Worlds, which: slice) -> tuple[Floats, Floats]:
    where = (ledger.world, ledger.tick, None, which)
    return worlds.news[where], worlds.told[where]

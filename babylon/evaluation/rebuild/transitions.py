"""Recorded play as transitions, for algorithms that learn offline.

The recorded replies are played again in the rebuilt markets. A transition's action is the menu's
entry nearest to the recorded decision; its reward is the payoff of the decision itself.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from babylon.core.errors import ReplayError
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.game.envs.coding import action_of, encode
from babylon.game.envs.ledger import ledger_of
from babylon.game.envs.observation import observe
from babylon.game.envs.trader import REWARD_USD
from babylon.game.envs.worlds import from_scenarios
from babylon.game.market.game import make_market
from babylon.game.market.orders import parse_decision
from babylon.game.market.scenario import Rules
from babylon.training.baselines.transitions import Transitions

Columns = tuple[list[np.ndarray], list[int], list[float], list[float]]


def transitions_of(recorded: Iterable[RecordedScenario], rules: Rules) -> Transitions:
    """Return the steps of all plays in worlds of the size of ``rules``, whose prices are exact.

    Raises:
        ReplayError: There is no such play.
    """
    found: Columns = ([], [], [], [])
    observations, codes, rewards, ends = found
    for one in recorded:
        sizes = len(one.scenario.questions), len(one.scenario.perps)
        if one.prices != "exact" or sizes != (rules.markets, rules.perps):
            continue
        for table in [one.plays] if one.players else [[play] for play in one.plays]:
            whole = [play for play in table if len(play.replies) == one.scenario.rules.ticks]
            if whole:
                _add(found, one, whole)
    if not codes:
        raise ReplayError(
            f"no recorded play has {rules.markets} questions, {rules.perps} perps, exact prices and"
            " a reply in every tick: choose other windows or --rules"
        )
    seen = np.stack(observations)
    return Transitions(
        observations=seen,
        codes=np.array(codes),
        rewards=np.array(rewards, np.float32),
        following=np.concatenate([seen[1:], seen[-1:]]),
        ends=np.array(ends, np.float32),
    )


def _add(found: Columns, one: RecordedScenario, table: Sequence[RecordedPlay]) -> None:
    """Play a market, and add the steps of each of its players, one player after the other."""
    market, worlds = make_market(one.scenario), from_scenarios([one.scenario])
    seats = {name: market.join(name) for name in one.players or (table[0].agent_id,)}
    played = {play.agent_id: play for play in table}
    names, rules = [*played], one.scenario.rules
    sizes = worlds.questions, worlds.perps
    columns: dict[str, Columns] = {name: ([], [], [], []) for name in names}
    worth = np.full(len(names), rules.start_balance)
    for tick in range(rules.ticks):
        ledger = ledger_of(market, names)
        equity = np.array([[seats[name].equity for name in names]])
        features = observe(ledger, worlds, equity)[0]
        decisions = {name: parse_decision(play.replies[tick]) for name, play in played.items()}
        actions = np.stack([action_of(seats[name], decisions[name]) for name in names])
        market.step(decisions)
        if market.over:
            market.settle()
        settled = ledger_of(market, names).settled(worlds.outcome, worlds.price[:, -1], rules.fee)[
            0
        ]
        codes = encode("menu", actions, *sizes)
        for number, name in enumerate(names):
            observations, coded, rewards, ends = columns[name]
            observations.append(features[number])
            coded.append(int(codes[number]))
            rewards.append(float(settled[number] - worth[number]) / REWARD_USD)
            ends.append(float(market.over))
        worth = settled
    # One player after the other: a step's successor is then the next row.
    for own in columns.values():
        found[0].extend(own[0])
        found[1].extend(own[1])
        found[2].extend(own[2])
        found[3].extend(own[3])

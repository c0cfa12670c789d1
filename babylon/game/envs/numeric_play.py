"""A numeric policy in the seats of the scalar game, as the arena, fleets and replay play it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from babylon.core.errors import ModelError
from babylon.core.numeric_manifest import read_manifest
from babylon.game.envs.actions import to_decision, to_orders
from babylon.game.envs.coding import chosen
from babylon.game.envs.ledger import Ledger, ledger_of
from babylon.game.envs.observation import Observation, feature_names, observe
from babylon.game.envs.worlds import Worlds, from_scenarios
from babylon.game.market.market import Seat
from babylon.game.market.orders import Decision
from babylon.game.market.scenario import Scenario

Decisions = Callable[[Sequence[Seat]], list[Decision]]


def numeric_decisions(path: Path) -> Decisions:
    """Load an exported policy → a function from seats to decisions. It has no random numbers.

    Raises:
        ModelError: It does not load, or was trained on other features than this version makes.
    """
    # Imported here because torch takes seconds to import.
    from babylon.policies.numeric_policy import load_numeric

    manifest = read_manifest(path)
    sizes = manifest.questions, manifest.perps
    if list(manifest.features) != feature_names(*sizes):
        raise ModelError(f"{path} was trained on other features than this version's: train it anew")
    policy = load_numeric(path)
    known: dict[int, tuple[Scenario, Worlds]] = {}

    def seen(seat: Seat) -> tuple[Ledger, Observation]:
        scenario = seat.scenario
        if not manifest.fits(len(scenario.questions), len(scenario.perps)):
            raise ModelError(
                f"{path} plays {sizes[0]} questions and {sizes[1]} perps, but"
                f" {scenario.scenario_id} has {len(scenario.questions)} and {len(scenario.perps)}:"
                " choose another suite or policy"
            )
        if id(scenario) not in known:  # the entry keeps the scenario, so its id is not used again
            known[id(scenario)] = scenario, from_scenarios([scenario])
        ledger = ledger_of(seat.market, [seat.account.name])
        return ledger, observe(ledger, known[id(scenario)][1], np.array([[seat.equity]]))[0, 0]

    def decide(seats: Sequence[Seat]) -> list[Decision]:
        if not seats:
            return []
        ledgers, observations = zip(*map(seen, seats), strict=True)
        actions = chosen(manifest.coding, policy.scores(np.stack(observations)), *sizes)
        found = []
        for seat, ledger, action in zip(seats, ledgers, actions, strict=True):
            orders = to_orders(action[None, None], ledger, seat.scenario.rules)
            found.append(to_decision(orders, 0, seat.scenario))
        return found

    return decide

"""Gymnasium and PettingZoo environments of the game.

Importing this package registers ``Babylon/Trader-v0`` (the hour) and ``Babylon/TraderStarter-v0``
(the small game), both with a vectorised version for ``gymnasium.make_vec``.
"""

import gymnasium

from babylon.game.envs.shared import MarketEnv
from babylon.game.envs.trader import TraderEnv
from babylon.game.envs.vector import TraderVectorEnv

__all__ = ["IDS", "MarketEnv", "TraderEnv", "TraderVectorEnv"]
IDS = {"Babylon/Trader-v0": "hour", "Babylon/TraderStarter-v0": "starter"}

for _id, _rules in IDS.items():
    gymnasium.register(
        _id,
        entry_point="babylon.game.envs.trader:TraderEnv",
        vector_entry_point="babylon.game.envs.vector:TraderVectorEnv",
        kwargs={"rules": _rules},
    )

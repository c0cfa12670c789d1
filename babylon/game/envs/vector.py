"""``gymnasium.vector.VectorEnv`` over the vectorised core: one trader in each of many worlds.

Worlds are drawn from a pool of scenarios that is made once. A play that ends is followed by the
next world within the same step (``AutoresetMode.SAME_STEP``): the observation is the new world's
first, and info holds ``final_obs`` and ``final_info``. Spaces and rewards are those of
``TraderEnv``.
"""

from collections.abc import Sequence

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from babylon.game.envs.actions import Action, action_space, to_orders
from babylon.game.envs.observation import Observation, observation_space, observe
from babylon.game.envs.trader import REWARD_USD, Info, choose_scenario, rules_of
from babylon.game.envs.vector_core import Core
from babylon.game.envs.worlds import Bools, Floats, Ints, Worlds, from_scenarios
from babylon.game.market.scenario import Rules, Scenario


class TraderVectorEnv(VectorEnv[Observation, Action, Floats | Bools]):
    """``num_envs`` worlds played at once.

    The pool consists of the given ``scenarios``, or of ``worlds`` scenarios made under ``rules``.
    In the second case ``reset(seed=...)`` makes the pool anew.
    ``reset(options={"reset_mask": mask})`` resets only those worlds. ``payoff`` changes the reward
    to the change of what the account is worth at the settlement: an order is then rewarded at once
    with its payoff. It is ground truth, never observed, and adds up to the P&L too.
    """

    metadata: Info = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 64,
        rules: Rules | str = "hour",
        worlds: int = 256,
        scenarios: Sequence[Scenario] = (),
        payoff: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self._payoff = payoff
        self._rules, self._pool = rules_of(rules), worlds
        self._given = from_scenarios(scenarios) if scenarios else None
        made = self._given
        sizes = (made.questions, made.perps) if made else (self._rules.markets, self._rules.perps)
        self.single_observation_space = observation_space(*sizes)
        self.single_action_space = action_space(*sizes)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.core: Core | None = None

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Observation, Info]:
        """Begin a play in every row, or in the rows of ``reset_mask`` → observations, info."""
        super().reset(seed=seed)
        mask = (options or {}).get("reset_mask")
        if self.core is None or (seed is not None and mask is None):
            self.core, mask = Core(self._given or self._make_worlds(), self.num_envs), None
        rows = self.core.rows if mask is None else np.flatnonzero(np.asarray(mask))
        self._begin(self.core, rows)
        return self._observe(self.core), {}

    def step(self, actions: Action) -> tuple[Observation, Floats, Bools, Bools, Info]:
        """Play one tick of every world.

        Info holds each world's P&L in dollars, and whether each action was carried out.
        """
        core = self._core
        orders = to_orders(np.asarray(actions)[:, None], core.ledger, core.rules)
        before = self._worth(core)
        _, done = core.step(orders)
        change = self._worth(core) - before
        over, observation = core.over, self._observe(core)
        values: Info = {"pnl": core.equity[:, 0] - core.rules.start_balance, "success": done[:, 0]}
        info = _masked(values, ~over)
        if over.any():
            info |= _final(observation, values, over)
            self._begin(core, np.flatnonzero(over))
            observation = self._observe(core)
        return observation, change / REWARD_USD, over, np.zeros_like(over), info

    def _worth(self, core: Core) -> Floats:
        """Return what the reward is the change of, in dollars. [B]"""
        if not self._payoff:
            return core.equity[:, 0].copy()
        worlds, world = core.worlds, core.ledger.world
        last = worlds.price[world, -1]
        return core.ledger.settled(worlds.outcome[world], last, core.rules.fee)[:, 0]

    @property
    def _core(self) -> Core:
        if self.core is None:
            raise ValueError("call reset() before step()")
        return self.core

    def _make_worlds(self) -> Worlds:
        return from_scenarios(
            [choose_scenario(self.np_random, self._rules, None) for _ in range(self._pool)]
        )

    def _begin(self, core: Core, rows: Ints) -> None:
        core.start(rows, self.np_random.integers(core.worlds.count, size=len(rows)))

    def _observe(self, core: Core) -> Observation:
        return observe(core.ledger, core.worlds, core.equity)[:, 0]


def _masked(values: Info, rows: Bools) -> Info:
    """Add to every key ``k`` gymnasium's mask ``_k`` of the rows that have it."""
    return values | {f"_{key}": rows.copy() for key in values}


def _final(observation: Observation, values: Info, over: Bools) -> Info:
    last = np.full(len(over), None, dtype=object)
    for row in np.flatnonzero(over):
        last[row] = observation[row]
    return _masked({"final_obs": last, "final_info": _masked(values, over)}, over)

"""``gymnasium.Env``: one trader plays a seeded scenario from its first tick to the settlement.

The reward is the change of the trader's equity in hundreds of dollars, as in the recorded
trajectories. The rewards of a play add up to its P&L. A play ends with its scenario. It is then
``terminated``, never ``truncated``, because the time left is part of the observation.
"""

import gymnasium
import numpy as np

from babylon.game.envs.actions import Action, action_space, to_decision, to_orders
from babylon.game.envs.ledger import ledger_of
from babylon.game.envs.observation import Observation, observation_space, observe
from babylon.game.envs.worlds import from_scenarios
from babylon.game.market.account import Outcome
from babylon.game.market.game import Game
from babylon.game.market.orders import Decision
from babylon.game.market.prompts import names_of, render_observation
from babylon.game.market.scenario import PRESETS, Rules, Scenario, make_scenario

REWARD_USD = 100.0
Info = dict[str, object]
Step = tuple[Observation, float, bool, bool, Info]


def rules_of(rules: Rules | str) -> Rules:
    """Return the rules of a preset's name, or the given rules.

    Raises:
        ValueError: No preset has that name.
    """
    if isinstance(rules, Rules):
        return rules
    if rules not in PRESETS:
        raise ValueError(f"rules {rules!r} are unknown: choose from {', '.join(PRESETS)}")
    return PRESETS[rules]


def choose_scenario(random: np.random.Generator, rules: Rules, options: Info | None) -> Scenario:
    """Return ``options["scenario"]``, or the scenario of the random stream's next seed.

    Raises:
        TypeError: ``options["scenario"]`` is not a scenario.
        ValueError: The given scenario does not fit the spaces.
    """
    given = (options or {}).get("scenario")
    if given is None:
        return make_scenario(int(random.integers(2**31)), rules)
    if not isinstance(given, Scenario):
        raise TypeError(f"options['scenario'] is {given!r}: give a Scenario")
    sizes = len(given.questions), len(given.perps)
    if sizes != (rules.markets, rules.perps):
        raise ValueError(
            f"{given.scenario_id} has {sizes[0]} questions and {sizes[1]} perps, not"
            f" {rules.markets} and {rules.perps}: make the environment with such rules"
        )
    return given


class TraderEnv(gymnasium.Env[Observation, Action]):
    """One trader in its own market under ``rules``, a preset's name or ``Rules``.

    ``reset(options={"scenario": scenario})`` plays that scenario instead of a seeded one. With
    ``render_mode="ansi"``, ``render`` returns the prompt of an LLM agent, and
    ``play(parse_decision(reply))`` plays its reply.
    """

    metadata: Info = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  # gymnasium's name

    def __init__(self, rules: Rules | str = "hour", render_mode: str | None = None) -> None:
        self.rules = rules_of(rules)
        self.render_mode = render_mode
        self.observation_space = observation_space(self.rules.markets, self.rules.perps)
        self.action_space = action_space(self.rules.markets, self.rules.perps)

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Observation, Info]:
        """Begin a play → observation, info."""
        super().reset(seed=seed)
        scenario = choose_scenario(self.np_random, self.rules, options)
        (self._name,) = names_of(scenario, 1)
        self.game, self._worlds = Game(scenario, self._name), from_scenarios([scenario])
        return self._observe(), {"scenario_id": scenario.scenario_id}

    def step(self, action: Action) -> Step:
        """Play one tick. Info holds the P&L in dollars and the outcome of the action."""
        orders = to_orders(np.asarray(action)[None, None], self._ledger, self.game.scenario.rules)
        return self.play(to_decision(orders, 0, self.game.scenario))

    def play(self, decision: Decision) -> Step:
        """Play one tick with a decision instead of an action."""
        before = self.game.pnl
        outcome = self.game.act(decision)
        if self.game.over:
            self.game.settle()
        pnl = self.game.pnl
        return (
            self._observe(),
            (pnl - before) / REWARD_USD,
            self.game.over,
            False,
            {"pnl": pnl, **outcome_info(outcome)},
        )

    def render(self) -> str | None:
        """Return the prompt of an LLM agent, or the P&L when the play is over."""
        if self.render_mode != "ansi":
            return None
        if self.game.over:
            return f"The play is over: P&L ${self.game.pnl:+.2f}."
        chat = render_observation(self.game, self._name)
        return "\n\n".join(message["content"] for message in chat)

    def _observe(self) -> Observation:
        self._ledger = ledger_of(self.game.market, [self._name])
        observations = observe(self._ledger, self._worlds, np.array([[self.game.equity]]))
        return observations.reshape(-1)


def outcome_info(outcome: Outcome) -> Info:
    """Return an action's outcome for an info dict."""
    info: Info = {"action_type": outcome.action_type, "success": outcome.success}
    return info if outcome.error is None else {**info, "error": outcome.error}

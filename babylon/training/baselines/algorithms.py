"""The algorithms, with what differs between them: one row each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from babylon.core.errors import ConfigError
from babylon.core.numeric_manifest import Coding

View: TypeAlias = Literal["worlds", "market", "bandit", "recorded"]
Memory: TypeAlias = Literal["none", "replay", "prioritised"]
ENVS = 64  # worlds that are played at once
TRADERS = 2  # that share a market, of the multi-agent algorithms
REPLAYED = 50_000  # transitions that a replay buffer holds
_NOISE = {"O_U_noise": False, "expl_noise": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A row of the table.

    ``agent`` is a class of ``agilerl.algorithms``, ``trainer`` a function of ``agilerl.training``.
    ``view``: many worlds at once, one shared market, a bandit's contexts, or recorded play.
    ``steps`` a generation: ticks of one trader, of all traders of a market, or gradient steps of an
    offline algorithm. ``settings`` are the agent's arguments.
    """

    agent: str
    trainer: str
    steps: int
    view: View = "worlds"
    coding: Coding = "menu"
    memory: Memory = "replay"
    settings: Mapping[str, Any] = field(default_factory=dict)


def _off_policy(
    agent: str, coding: Coding = "menu", memory: Memory = "replay", **settings: Any
) -> Algorithm:
    return Algorithm(
        agent=agent,
        trainer="train_off_policy",
        steps=12_800,
        coding=coding,
        memory=memory,
        settings={"batch_size": 128, "learn_step": 16, "gamma": 0.9, "tau": 0.02, **settings},
    )


def _shared(agent: str, **settings: Any) -> Algorithm:
    return Algorithm(
        agent=agent,
        trainer="train_multi_agent_off_policy",
        steps=4_800,
        view="market",
        coding="dials",
        settings={"batch_size": 128, "learn_step": 8, "gamma": 0.9, **_NOISE, **settings},
    )


def _bandit(agent: str) -> Algorithm:
    return Algorithm(
        agent=agent,
        trainer="train_bandits",
        steps=600,
        view="bandit",
        settings={"batch_size": 64, "learn_step": 2, "lr": 1e-3},
    )


_ACTOR: dict[str, Any] = {"lr_actor": 5e-4, "lr_critic": 1e-3, "vect_noise_dim": ENVS, **_NOISE}
ALGORITHMS = {
    "dqn": _off_policy("DQN", lr=1e-3),
    "rainbow": _off_policy("RainbowDQN", memory="prioritised", lr=1e-3),
    "ddpg": _off_policy("DDPG", "dials", **_ACTOR),
    "td3": _off_policy("TD3", "dials", **_ACTOR),
    "ppo": Algorithm(
        agent="PPO",
        trainer="train_on_policy",
        steps=24_576,
        memory="none",
        settings={
            "learn_step": 1536,
            "batch_size": 256,
            "gamma": 0.9,
            "lr": 1e-3,
            "ent_coef": 0.01,
            "num_envs": ENVS,
        },
    ),
    "cqn": Algorithm(
        agent="CQN",
        trainer="train_offline",
        steps=1_000,
        view="recorded",
        settings={"batch_size": 128, "lr": 1e-3, "gamma": 0.9, "tau": 0.02, "double": True},
    ),
    "maddpg": _shared("MADDPG"),
    "matd3": _shared("MATD3"),
    "ippo": Algorithm(
        agent="IPPO",
        trainer="train_multi_agent_on_policy",
        steps=4_800,
        view="market",
        memory="none",
        settings={"learn_step": 240, "batch_size": 96, "gamma": 0.9, "lr": 1e-3},
    ),
    "neural-ucb": _bandit("NeuralUCB"),
    "neural-ts": _bandit("NeuralTS"),
}


def find_algorithm(name: str) -> Algorithm:
    """Return a row of the table.

    Raises:
        ConfigError: There is no such row.
    """
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm {name!r} is unknown: choose from {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]

"""One loop over all algorithms: a generation of agilerl's trainer, fitness, selection, mutation.

Fitness is the mean P&L of the greedy policy, the one that is exported, on the same worlds for every
member and generation. The elite is the best policy of all generations. Each generation begins with
seeds of its own and ends with one atomically written file, so a resumed run equals an uninterrupted
one.
"""

import importlib
import io
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from babylon.core.errors import ConfigError, ModelError
from babylon.core.home import make_directory
from babylon.core.numeric_manifest import NumericManifest
from babylon.game.envs.observation import feature_names
from babylon.game.envs.worlds import Worlds, from_scenarios
from babylon.game.market.scenario import PRESETS, make_scenario
from babylon.policies.numeric_policy import save_numeric
from babylon.training.baselines.algorithms import REPLAYED, Algorithm, find_algorithm
from babylon.training.baselines.export import GreedyScores, play_greedily
from babylon.training.baselines.transitions import Transitions
from babylon.training.baselines.views import make_view, spaces_of

RUN, STATE, ELITE, POLICY = "run.json", "state.pt", "elite.pt", "policy"
TICKS = 7680  # of all validation worlds together
EXPLORATION = 0.6  # factor a generation of DQN's share of random actions
LEAST = 0.05  # that share at least
MUTATIONS = {"no_mutation": 0.4, "rl_hp": 0.4}
ARCHITECTURE = 0.2
INSTALL = "install babylon-rl[agilerl] into an environment of its own, and run this command there"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRun:
    """The training of a baseline.

    ``steps`` a generation and member; None: the algorithm's own. ``windows``: the recorded ones
    that ``cqn`` learns from, and ``source``, the dataset that holds them; None: the database.
    """

    algorithm: str
    rules: str = "starter"
    population: int = 1
    seed: int = 0
    steps: int | None = None
    windows: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineMember:
    """A member of a generation. ``mutation``: that of its settings or network before it trained."""

    generation: int
    member: int
    mutation: str | None
    pnl: float  # dollars a validation world
    steps: int  # so far


Report = Callable[[BaselineMember], None]


@dataclass(slots=True, kw_only=True)
class _State:
    """Everything that a generation leaves to the next one."""

    members: list[Any]
    env: Any
    memory: Any
    history: list[BaselineMember]
    elite: bytes = b""


def train_baseline(
    directory: Path,
    run: BaselineRun,
    generations: int,
    recorded: Transitions | None = None,
    report: Report | None = None,
) -> list[BaselineMember]:
    """Train until ``generations`` are done, and export the elite → all members. Blocking.

    A directory that holds some generations of the same run goes on with the next one.

    Raises:
        ConfigError: agilerl is not installed, or the directory holds another run.
        ModelError: The state, or what was trained, cannot be read.
    """
    algorithm = find_algorithm(run.algorithm)
    if algorithm.view == "recorded" and recorded is None:
        raise ConfigError(f"{run.algorithm} learns from recorded play: give --windows")
    _require_agilerl()
    _claim(directory, run)
    state = _load(directory, algorithm) if (directory / STATE).exists() else None
    state = state or _begin(algorithm, run, recorded)
    worlds = _validation(run.rules)
    done = state.history[-1].generation + 1 if state.history else 0
    for generation in range(done, generations):
        # Seeded here and not once: what was drawn before a kill must not matter to a resumed run.
        _seed(run.seed, generation)
        if generation and run.population > 1:
            state.members = _evolved(state.members, algorithm, run)
        _train(state, algorithm, run, generation)
        for row in _rated(state, algorithm, worlds, generation):
            if report:
                report(row)
        _save(directory, state)
        # Go on as a resumed run would: agilerl's agents hold more than their checkpoints keep.
        state = _load(directory, algorithm)
    export_elite(directory, directory / POLICY)
    return state.history


def export_elite(directory: Path, target: Path) -> NumericManifest:
    """Export a run's elite → its manifest.

    Raises:
        ConfigError: agilerl is not installed.
        ModelError: The directory holds no trained baseline.
    """
    if not (directory / ELITE).exists():
        raise ModelError(f"{directory} holds no trained baseline: `babylon baseline train`")
    _require_agilerl()
    run = _run_of(directory / RUN)
    algorithm, rules = find_algorithm(run.algorithm), PRESETS[run.rules]
    stored = _read(directory / ELITE)
    (agent,) = _restored([stored["agent"]], algorithm, make_view(algorithm, run.rules, 0))
    manifest = NumericManifest(
        algorithm=run.algorithm,
        coding=algorithm.coding,
        questions=rules.markets,
        perps=rules.perps,
        features=tuple(feature_names(rules.markets, rules.perps)),
        rules=run.rules,
        steps=stored["row"]["steps"],
        seed=run.seed,
        pnl=stored["row"]["pnl"],
    )
    save_numeric(target, GreedyScores(agent, algorithm), manifest)
    return manifest


def _require_agilerl() -> None:
    try:
        importlib.import_module("agilerl.algorithms")
    except ModuleNotFoundError as error:
        raise ConfigError(f"agilerl cannot be imported ({error}): {INSTALL}") from error


def _claim(directory: Path, run: BaselineRun) -> None:
    """Write what is trained, or check that the directory holds the same."""
    path = directory / RUN
    if path.exists():
        known = _run_of(path)
        if known != run:
            raise ConfigError(f"{directory} holds {known}, not {run}: give another --name")
        return
    make_directory(directory)
    path.write_bytes(msgspec.json.encode(run))


def _run_of(path: Path) -> BaselineRun:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BaselineRun)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} does not load ({error}): remove it and train again") from error


def _begin(algorithm: Algorithm, run: BaselineRun, recorded: Transitions | None) -> _State:
    _seed(run.seed, -1)
    env = make_view(algorithm, run.rules, run.seed)
    members = _population(algorithm, env, run.population)
    return _State(members=members, env=env, memory=_memory(algorithm, recorded), history=[])


def _population(algorithm: Algorithm, env: Any, size: int) -> list[Any]:
    agent = getattr(importlib.import_module("agilerl.algorithms"), algorithm.agent)
    observation, action = spaces_of(env)
    settings = dict(algorithm.settings)
    if algorithm.view == "market":
        settings["agent_ids"] = list(env.possible_agents)
    found: list[Any] = agent.population(size, observation, action, **settings)
    return found


def _memory(algorithm: Algorithm, recorded: Transitions | None) -> Any:
    from agilerl.components import PrioritizedReplayBuffer, ReplayBuffer

    if algorithm.memory == "none":
        return None
    if algorithm.memory == "prioritised":
        return PrioritizedReplayBuffer(max_size=REPLAYED)
    if algorithm.view != "recorded" or recorded is None:
        return ReplayBuffer(max_size=REPLAYED)
    memory = ReplayBuffer(max_size=len(recorded.codes))
    memory.add(recorded.batch())
    return memory


def _train(state: _State, algorithm: Algorithm, run: BaselineRun, generation: int) -> None:
    """Let agilerl's trainer do one generation. Its own selection, fitness and loggers stay off."""
    module = importlib.import_module(f"agilerl.training.{algorithm.trainer}")
    steps = run.steps or algorithm.steps
    more: dict[str, Any] = {} if state.memory is None else {"memory": state.memory}
    if algorithm.trainer == "train_off_policy":
        share = max(LEAST, EXPLORATION**generation)
        more |= {"eps_start": share, "eps_end": share, "eps_decay": 1.0}
    elif algorithm.trainer == "train_bandits":
        more |= {"episode_steps": steps}
    elif algorithm.trainer == "train_offline":
        more |= {"dataset": {"rewards": torch.zeros(0)}}  # the memory holds it
    so_far = [agent.steps for agent in state.members]
    for agent in state.members:
        agent.steps = 0
    getattr(module, algorithm.trainer)(
        state.env,
        run.rules,
        algorithm.agent,
        state.members,
        max_steps=steps,
        evo_steps=steps,
        eval_steps=1,
        verbose=False,
        **more,
    )
    for agent, before in zip(state.members, so_far, strict=True):
        agent.steps += before


def _rated(
    state: _State, algorithm: Algorithm, worlds: Worlds, generation: int
) -> list[BaselineMember]:
    """Rate the members, and keep the best of all generations."""
    rows: list[BaselineMember] = []
    for agent in state.members:
        module = GreedyScores(agent, algorithm)
        row = BaselineMember(
            generation=generation,
            member=agent.index,
            mutation=agent.mut if generation and len(state.members) > 1 else None,
            pnl=round(float(play_greedily(module, algorithm, worlds).mean()), 4),
            steps=agent.steps,
        )
        agent.fitness = [row.pnl]
        if row.pnl > max((one.pnl for one in state.history + rows), default=float("-inf")):
            state.elite = _packed({"row": asdict(row), "agent": _checkpoint(agent)})
        rows.append(row)
    state.history += rows
    return rows


def _evolved(members: list[Any], algorithm: Algorithm, run: BaselineRun) -> list[Any]:
    """Return the next generation: the best member as it is, and mutants of tournaments' winners."""
    from agilerl.hpo.mutation import Mutations
    from agilerl.hpo.tournament import TournamentSelection
    from agilerl.utils.utils import run_selection_and_mutation

    # Each network draws its new layers and nodes from a generator of its own, which is not saved.
    # agilerl keeps their names in the order of a set, which differs between processes.
    for agent in members:
        for group in agent.evolvable_attributes(networks_only=True).values():
            for network in group.values() if hasattr(group, "values") else [group]:
                network.rng = np.random.default_rng(random.randrange(2**31))
                network._layer_mutation_methods.sort()
                network._node_mutation_methods.sort()
    found: list[Any] = run_selection_and_mutation(
        TournamentSelection(2, True, run.population),
        members,
        Mutations(
            **MUTATIONS,
            # agilerl 2.58 fails to grow a critic of several traders along with their actors.
            architecture=0.0 if algorithm.view == "market" else ARCHITECTURE,
            new_layer_prob=0.2,
            parameters=0.0,  # needs gradients that the trainer captures only if it mutates itself
            activation=0.0,
            mutate_elite=False,
            rand_seed=random.randrange(2**31),
        ),
        run.rules,
    )
    return found


def _seed(seed: int, generation: int) -> None:
    from agilerl.utils.mutation_utils import set_global_seed

    random.seed(f"baseline:{seed}:{generation}")
    set_global_seed(random.randrange(2**31))  # numpy, torch, fastrand


def _validation(rules: str) -> Worlds:
    count = max(16, TICKS // PRESETS[rules].ticks)
    scenarios = [make_scenario(f"baseline:{number}", PRESETS[rules]) for number in range(count)]
    return from_scenarios(scenarios)


def _checkpoint(agent: Any) -> bytes:
    file = io.BytesIO()
    agent.save_checkpoint(file)
    return file.getvalue()


def _restored(checkpoints: list[bytes], algorithm: Algorithm, env: Any) -> list[Any]:
    members = _population(algorithm, env, len(checkpoints))
    for agent, content in zip(members, checkpoints, strict=True):
        agent.load_checkpoint(io.BytesIO(content))
    return members


def _packed(value: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _save(directory: Path, state: _State) -> None:
    content = {
        "members": [_checkpoint(agent) for agent in state.members],
        "fitness": [agent.fitness for agent in state.members],
        "steps": [agent.steps for agent in state.members],
        "env": state.env,
        "memory": state.memory,
        "history": state.history,
        "elite": state.elite,
    }
    for name, data in ((ELITE, state.elite), (STATE, _packed(content))):
        temporary = directory / f".{name}"
        temporary.write_bytes(data)
        os.replace(temporary, directory / name)


def _load(directory: Path, algorithm: Algorithm) -> _State:
    stored = _read(directory / STATE)
    members = _restored(stored["members"], algorithm, stored["env"])
    for agent, fitness, steps in zip(members, stored["fitness"], stored["steps"], strict=True):
        agent.fitness, agent.steps = fitness, steps
        if hasattr(agent, "exp_layer"):  # a bandit's loaded actor is another than its layer's
            agent.exp_layer = agent.actor.get_output_dense()
    return _State(
        members=members,
        env=stored["env"],
        memory=stored["memory"],
        history=stored["history"],
        elite=stored["elite"],
    )


def _read(path: Path) -> dict[str, Any]:
    """Read a file that this module wrote; it holds pickles, so only from one's own home."""
    try:
        stored: dict[str, Any] = torch.load(path, weights_only=False)
    except (OSError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise ModelError(f"{path} does not load ({error}): remove it and train again") from error
    return stored

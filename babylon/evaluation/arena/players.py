"""The arena's players: registered policies, checkpoint directories, exported numeric policies and
scripted agents."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from babylon.core.errors import ArenaError, ModelError
from babylon.core.home import Home
from babylon.core.learning_settings import Precision
from babylon.core.numeric_manifest import is_numeric, read_manifest
from babylon.evaluation.arena.play import (
    Decide,
    PlayerResult,
    play,
    replies,
    result_of,
    scripted,
    yardsticks,
)
from babylon.game.market.scenario import Rules, Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.policies.shared_files import fetch_checkpoint
from babylon.store.connection import Store
from babylon.store.policies import Policy, get_policy

SCRIPTED, BASELINE = "scripted:", "baseline:"
_FINGERPRINT_WORLDS = 8
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A player. ``enter`` loads its weights and returns its decisions; it blocks.

    Results are stored under ``identity``. A checkpoint's directory has none, because its content
    may change; a numeric policy's is the digest of its program. ``identity_of`` completes a
    scripted agent's. ``version``: that of a registered policy.
    """

    name: str
    enter: Callable[[], Decide]
    identity: str | None = None
    version: int | None = None


def checkpoint_player(path: str, seed: int, precision: Precision = "fp32") -> Decide:
    """Load a checkpoint as the engine does, frozen weights in ``precision``. Blocking.

    Raises:
        ModelError: The checkpoint does not load or cannot answer.
    """
    # Imported here because torch takes seconds to import.
    from babylon.evaluation.arena.checkpoint_replies import reply_policy

    return replies(reply_policy(path, precision), seed)


def policy_player(home: Home, policy: Policy, seed: int, member: str = "") -> Player:
    """Return a registered policy's player. ``member``: the member of a population that it is."""
    version = policy.policy_version
    return Player(
        name=f"policy {version}{member}",
        enter=lambda: checkpoint_player(fetch_checkpoint(home, policy.uri), seed),
        identity=f"policy:{version}",
        version=version,
    )


def scripted_player(name: str, seed: int) -> Player:
    """Return a scripted agent's player.

    Raises:
        ArenaError: No scripted agent has that name.
    """
    if name not in SCRIPTED_AGENTS:
        raise ArenaError(
            f"no scripted agent is called {name!r}: choose from {', '.join(SCRIPTED_AGENTS)}"
        )
    agent = SCRIPTED_AGENTS[name]
    return Player(
        name=f"{SCRIPTED}{name}", enter=lambda: scripted(agent, seed), identity=f"{SCRIPTED}{name}"
    )


def numeric_player(path: Path, name: str) -> Player:
    """Return an exported numeric policy's player.

    Raises:
        ModelError: Its manifest cannot be read.
    """

    def enter() -> Decide:
        from babylon.game.envs.numeric_play import numeric_decisions  # gymnasium is slow to import

        return numeric_decisions(path)

    return Player(name=name, enter=enter, identity=f"numeric:{read_manifest(path).digest}")


def baseline_players(home: Home, rules: Rules) -> list[Player]:
    """Return the home's exported baselines that can play by these rules, by name."""
    found = []
    for path in sorted(home.baselines.glob("*/policy")):
        try:
            if is_numeric(path) and read_manifest(path).fits(rules.markets, rules.perps):
                found.append(numeric_player(path, f"{BASELINE}{path.parent.name}"))
        except ModelError as error:  # one damaged baseline must not stop a gate
            log.warning("baseline left out: %s", error)
    return found


def all_yardsticks(home: Home, worlds: Sequence[Scenario]) -> dict[str, PlayerResult]:
    """Return the results of random, news, oracle and the home's baselines. Blocking."""
    results = yardsticks(worlds)
    for player in baseline_players(home, worlds[0].rules):
        try:
            results[player.name] = result_of(play(player.enter(), worlds))
        except ModelError as error:  # as above
            log.warning("%s left out: %s", player.name, error)
    return results


def identity_of(player: Player, worlds: list[Scenario]) -> str | None:
    """Return the identity under which results are stored; None: do not store.

    A policy version's weights never change. A scripted agent's code may, so its identity carries a
    digest of its results in the first worlds.
    """
    if player.identity is None or not player.identity.startswith(SCRIPTED):
        return player.identity
    ended = play(player.enter(), worlds[:_FINGERPRINT_WORLDS]).pnl.round(2).tolist()
    return f"{player.identity}#{hashlib.sha256(repr(ended).encode()).hexdigest()[:8]}"


async def find_player(store: Store, text: str, seed: int) -> Player:
    """Return the player of a policy version, or that of ``unregistered_player``.

    Raises:
        ArenaError: The text names no player, or the policy's checkpoint was removed.
        ModelError: The policy version does not exist.
    """
    if not is_version(text):
        return unregistered_player(text, seed)
    policy = await get_policy(store, int(text))
    if policy.removed_at is not None:
        raise ArenaError(
            f"the checkpoint of policy {text} was removed on {policy.removed_at:%Y-%m-%d}:"
            " `babylon model list` shows the policies that can play"
        )
    return policy_player(store.home, policy, seed)


def is_version(text: str) -> bool:
    """Return whether the text names a registered policy, which needs a database to find."""
    return text.isdecimal()


def unregistered_player(text: str, seed: int) -> Player:
    """Return the player of ``scripted:NAME``, of a checkpoint's or of a numeric policy's path.

    Raises:
        ArenaError: The text is none of them.
    """
    if text.startswith(SCRIPTED):
        return scripted_player(text.removeprefix(SCRIPTED), seed)
    if not Path(text).is_dir():
        raise ArenaError(
            f"{text!r} is not a player: give a policy version, the directory of a checkpoint or of"
            f" a numeric policy, or {SCRIPTED}{{{','.join(SCRIPTED_AGENTS)}}}"
        )
    if is_numeric(text):
        return numeric_player(Path(text), text)
    return Player(name=text, enter=partial(checkpoint_player, text, seed))

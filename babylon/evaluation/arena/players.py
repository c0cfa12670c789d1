"""The arena's players: registered policies, checkpoint directories and scripted agents."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from babylon.core.errors import ArenaError
from babylon.core.home import Home
from babylon.evaluation.arena.play import Decide, play, replies, scripted
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.policies.shared_files import fetch_checkpoint
from babylon.store.connection import Store
from babylon.store.policies import Policy, get_policy

SCRIPTED = "scripted:"
_FINGERPRINT_WORLDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A player. ``enter`` loads its weights and returns its decisions; it blocks.

    Results are stored under ``identity``. A directory has none, because its content may change.
    ``identity_of`` completes a scripted agent's. ``version``: that of a registered policy.
    """

    name: str
    enter: Callable[[], Decide]
    identity: str | None = None
    version: int | None = None


def checkpoint_player(path: str, seed: int) -> Decide:
    """Load a checkpoint as the engine does. Blocking.

    Raises:
        ModelError: The checkpoint does not load or cannot answer.
    """
    # Imported here because torch takes seconds to import.
    from babylon.evaluation.arena.checkpoint_replies import reply_policy

    return replies(reply_policy(path), seed)


def policy_player(home: Home, policy: Policy, seed: int) -> Player:
    version = policy.policy_version
    return Player(
        name=f"policy {version}",
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
    """Return the player of ``scripted:NAME`` or of a checkpoint's path.

    Raises:
        ArenaError: The text is neither.
    """
    if text.startswith(SCRIPTED):
        return scripted_player(text.removeprefix(SCRIPTED), seed)
    if not Path(text).is_dir():
        raise ArenaError(
            f"{text!r} is not a player: give a policy version, a checkpoint directory, or"
            f" {SCRIPTED}{{{','.join(SCRIPTED_AGENTS)}}}"
        )
    return Player(name=text, enter=partial(checkpoint_player, text, seed))

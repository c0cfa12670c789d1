"""Who plays: a registered policy, a checkpoint directory, or a scripted agent."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from babylon.core.errors import ArenaError
from babylon.evaluation.arena.play import Decide, play, replies, scripted
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.store.connection import Store
from babylon.store.policies import Policy, get_policy

SCRIPTED = "scripted:"
_FINGERPRINT_WORLDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """``enter`` makes it ready to play, loading its weights. Blocking.

    ``identity`` names what never changes, so that its results can be kept; a directory, whose
    content may, has none. A scripted agent's is filled in by ``identity_of``.
    """

    name: str
    enter: Callable[[], Decide]
    identity: str | None = None


def checkpoint_player(path: str, seed: int) -> Decide:
    """Load a checkpoint as the engine does. Blocking.

    Raises:
        ModelError: the checkpoint does not load, or cannot answer.
    """
    from babylon.evaluation.arena.checkpoint_player import (
        reply_policy,  # torch takes seconds to import
    )

    return replies(reply_policy(path), seed)


def policy_player(policy: Policy, seed: int) -> Player:
    version = policy.policy_version
    return Player(
        name=f"policy {version}",
        enter=partial(checkpoint_player, policy.uri, seed),
        identity=f"policy:{version}",
    )


def scripted_player(name: str, seed: int) -> Player:
    """Raises ArenaError when there is no such agent."""
    if name not in SCRIPTED_AGENTS:
        raise ArenaError(
            f"no scripted agent is called {name!r}: there are {', '.join(SCRIPTED_AGENTS)}"
        )
    agent = SCRIPTED_AGENTS[name]
    return Player(
        name=f"{SCRIPTED}{name}",
        enter=lambda: scripted(agent, seed),
        identity=f"{SCRIPTED}{name}",
    )


def identity_of(player: Player, worlds: list[Scenario]) -> str | None:
    """A policy's weights never change under its version; a scripted agent is what it does: how its
    first worlds ended is part of its identity, so a changed agent is another one."""
    if player.identity is None or not player.identity.startswith(SCRIPTED):
        return player.identity
    ended = play(player.enter(), worlds[:_FINGERPRINT_WORLDS]).pnl.round(2).tolist()
    return f"{player.identity}#{hashlib.sha256(repr(ended).encode()).hexdigest()[:8]}"


async def find_player(store: Store, text: str, seed: int) -> Player:
    """A policy version, or whoever ``unregistered_player`` finds.

    Raises:
        ArenaError: it is nobody, or its checkpoint was removed.
        ModelError: there is no policy of that version.
    """
    if not is_version(text):
        return unregistered_player(text, seed)
    policy = await get_policy(store, int(text))
    if policy.removed_at is not None:
        raise ArenaError(
            f"the checkpoint of policy {text} was removed on {policy.removed_at:%Y-%m-%d}:"
            " see `babylon model list` for those that are there"
        )
    return policy_player(policy, seed)


def is_version(text: str) -> bool:
    """Does it name a registered policy, for which a database is needed?"""
    return text.isdecimal()


def unregistered_player(text: str, seed: int) -> Player:
    """``scripted:NAME``, or the path of a checkpoint. Raises ArenaError when it is neither."""
    if text.startswith(SCRIPTED):
        return scripted_player(text.removeprefix(SCRIPTED), seed)
    if not Path(text).is_dir():
        raise ArenaError(
            f"{text!r} is no player: name a policy version, a checkpoint directory, or"
            f" {SCRIPTED}{{{','.join(SCRIPTED_AGENTS)}}}"
        )
    return Player(name=text, enter=partial(checkpoint_player, text, seed))

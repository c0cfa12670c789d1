"""All players on one frozen suite. What was played once is not played again."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec

from babylon.core.errors import ModelError
from babylon.evaluation.arena.play import play
from babylon.evaluation.arena.player_result import Result, result_of
from babylon.evaluation.arena.players import Player, identity_of, policy_player, scripted_player
from babylon.evaluation.arena.suite import Suite, digest
from babylon.game.market.scenario import Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.store.arena_results import register_suite, store_result, stored_result
from babylon.store.connection import Store
from babylon.store.policies import list_policies

Entered = Callable[[str, int, int], None]  # who plays next, done, of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A row of the leaderboard; ``problem`` says why a player has no result."""

    player: str
    result: Result | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Venue:
    """A suite that was checked against its registration, with its worlds made."""

    suite: Suite
    digest: str
    worlds: list[Scenario]


async def open_venue(store: Store, suite: Suite) -> Venue:
    """Raises ArenaError when the suite's worlds are not those that were registered."""
    worlds = suite.worlds()
    found = digest(worlds)
    await register_suite(store, suite.name, suite.version, digest=found, scenarios=suite.scenarios)
    return Venue(suite=suite, digest=found, worlds=worlds)


async def played(store: Store, venue: Venue, player: Player, seed: int) -> Result:
    """The player's result at this venue, from Postgres where it is known.

    Raises:
        ModelError: the player's checkpoint does not load.
    """
    identity = identity_of(player, venue.worlds)
    if identity and (known := await stored_result(store, venue.digest, identity, seed)):
        return msgspec.convert(known, Result)
    decide = await asyncio.to_thread(player.enter)
    result = result_of(await asyncio.to_thread(play, decide, venue.worlds))
    if identity:
        await store_result(store, venue.digest, identity, seed, asdict(result))
    return result


async def everyone(store: Store, seed: int) -> list[Player]:
    """Every policy whose checkpoint is there, and every scripted agent."""
    policies = [policy for policy in await list_policies(store) if policy.removed_at is None]
    return [
        *(policy_player(policy, seed) for policy in policies),
        *(scripted_player(name, seed) for name in SCRIPTED_AGENTS),
    ]


async def leaderboard(
    store: Store, venue: Venue, players: Sequence[Player], seed: int, entered: Entered | None = None
) -> list[Standing]:
    """Best first; those that cannot play last."""
    standings = []
    for number, player in enumerate(players):
        if entered is not None:
            entered(player.name, number, len(players))
        try:
            result = await played(store, venue, player, seed)
        except ModelError as error:  # of one checkpoint: the others are compared all the same
            standings.append(Standing(player=player.name, result=None, problem=str(error)))
        else:
            standings.append(Standing(player=player.name, result=result))
    return sorted(
        standings, key=lambda s: s.result.mean_pnl.mean if s.result else float("-inf"), reverse=True
    )

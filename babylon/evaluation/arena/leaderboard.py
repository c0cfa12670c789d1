"""The results of all players on one frozen suite, stored in Postgres so that each plays once."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import msgspec

from babylon.core.errors import ArtifactError, ModelError, ServingError
from babylon.evaluation.arena.engine_players import entered
from babylon.evaluation.arena.play import PlayerResult, play, result_of
from babylon.evaluation.arena.players import (
    Player,
    baseline_players,
    identity_of,
    policy_player,
    scripted_player,
)
from babylon.evaluation.arena.suite import Suite, digest
from babylon.game.market.scenario import Rules, Scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from babylon.store.arena_results import register_suite, store_result, stored_result
from babylon.store.connection import Store
from babylon.store.policies import list_policies
from babylon.store.population import list_siblings

PlayerStarted = Callable[[str, int, int], None]  # (player's name, players done, players in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A row of the leaderboard; ``problem`` is the reason of a missing result."""

    player: str
    result: PlayerResult | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSuite:
    """A suite whose digest matches its registration, with its worlds."""

    suite: Suite
    digest: str
    worlds: list[Scenario]


async def check_suite(store: Store, suite: Suite) -> CheckedSuite:
    """Make the suite's worlds, and register their digest if the suite is new.

    Raises:
        ArenaError: The worlds differ from the registered ones.
    """
    worlds = suite.worlds()
    found = digest(worlds)
    await register_suite(store, suite.name, suite.version, digest=found, scenarios=suite.scenarios)
    return CheckedSuite(suite=suite, digest=found, worlds=worlds)


async def player_result(
    store: Store, suite: CheckedSuite, player: Player, seed: int, model: str
) -> PlayerResult:
    """Return the player's stored result on this suite, or play it and store the result.

    A policy answers through the engine that serves ``model``, if there is one.

    Raises:
        ArtifactError: The object store does not deliver the player's checkpoint.
        ModelError: The player's checkpoint does not load.
        ServingError: The engine does not load or answer it.
    """
    identity = identity_of(player, suite.worlds)
    if identity and (known := await stored_result(store, suite.digest, identity, seed)):
        return msgspec.convert(known, PlayerResult)
    async with entered(store, model, seed, [player]) as (decide,):
        result = result_of(await asyncio.to_thread(play, decide, suite.worlds))
    if identity:
        await store_result(store, suite.digest, identity, seed, asdict(result))
    return result


async def all_players(store: Store, seed: int, rules: Rules) -> list[Player]:
    """Return all policies whose checkpoints still exist, with the member of a population that each
    is, the home's baselines for these rules, and all scripted agents."""
    policies = [policy for policy in await list_policies(store) if policy.removed_at is None]
    member = {
        sibling.batch_id: f" (member {sibling.member} of generation {sibling.generation})"
        for sibling in await list_siblings(store)
        if sibling.chosen
    }
    return [
        *(
            policy_player(store.home, policy, seed, member.get(policy.batch_id or "", ""))
            for policy in policies
        ),
        *baseline_players(store.home, rules),
        *(scripted_player(name, seed) for name in SCRIPTED_AGENTS),
    ]


async def leaderboard(
    store: Store,
    suite: CheckedSuite,
    players: Sequence[Player],
    seed: int,
    model: str,
    started: PlayerStarted | None = None,
) -> list[Standing]:
    """Return all standings by mean P&L, best first. Players without a result come last."""
    standings = []
    for number, player in enumerate(players):
        if started is not None:
            started(player.name, number, len(players))
        try:
            result = await player_result(store, suite, player, seed, model)
        except (
            ArtifactError,
            ModelError,
            ServingError,
        ) as error:  # one broken checkpoint must not stop the comparison
            standings.append(Standing(player=player.name, result=None, problem=str(error)))
        else:
            standings.append(Standing(player=player.name, result=result))
    return sorted(
        standings, key=lambda s: s.result.mean_pnl.mean if s.result else float("-inf"), reverse=True
    )

"""Stage ``validate checkpoint``: a challenger must clearly beat the champion before it serves.

Each window's gate plays worlds of its own: what the fleet played lately, and fresh ones seeded by
the window's batch (``babylon.evaluation.arena.recorded_worlds``). Held-out recorded play can veto,
and so can a suite that stays the same for months (``babylon.evaluation.arena.frozen``).
Where no worlds can be made, it may also promote, and a live canary decides what it cannot.
``EVALUATOR`` names a task of the user's own instead.
"""

import asyncio
from dataclasses import asdict, replace

import msgspec

from babylon.core.learning_settings import TrainingSettings
from babylon.core.settings import EvaluationSettings, Settings
from babylon.core.types import Trained, Verdict
from babylon.evaluation.arena.engine_players import entered
from babylon.evaluation.arena.frozen import frozen_check, withheld
from babylon.evaluation.arena.held_out import held_out_check
from babylon.evaluation.arena.match import Progress, compare
from babylon.evaluation.arena.players import policy_player
from babylon.evaluation.arena.recorded_worlds import gate_worlds
from babylon.evaluation.arena.suite import digest
from babylon.evaluation.arena.verdicts import match_verdict, recorded_verdict, reported
from babylon.policies.shared_files import fetch_checkpoint
from babylon.store.connection import Store
from babylon.store.lineage import descends
from babylon.store.policies import Policy, champion, get_policy, set_verdict
from babylon.store.population import fitness_by_member, list_siblings
from babylon.store.routes import RESTORER, all_routes, same_champion_since, taken_back
from babylon.training.progress_directory import claim_name
from babylon.training.update_health import ruled_out


async def validate_checkpoint(
    store: Store, settings: Settings, trained: Trained, *, progress: Progress | None = None
) -> Verdict:
    """Compare challenger and champion on unseen worlds, and store the verdict.

    The verdict of an earlier run of the window stands while the route that it is about is in force.
    An update whose own metrics rule it out is rejected without a game.

    Raises:
        ModelError: a checkpoint does not load.
        ServingError: the engine that serves does not load or answer a policy.
    """
    serving, route_version = await champion(store)
    if earlier := await _earlier_verdict(store, trained, serving):
        return earlier
    if reason := ruled_out(trained.metrics):
        verdict = Verdict(
            claim=trained.claim,
            policy_version=trained.policy_version,
            route_version=route_version,
            promote=False,
            reason=reason,
        )
    else:
        verdict = await _met(
            store,
            trained,
            serving,
            route_version,
            progress,
            seed=settings.seed,
            evaluation=settings.evaluation,
            training=settings.training,
            model=settings.model.name,
        )
    # Rejections are stored too: a run that resumes must not play the match again.
    await set_verdict(store, trained.claim, trained.policy_version, asdict(verdict))
    return verdict


async def _met(
    store: Store,
    trained: Trained,
    serving: Policy,
    route_version: int,
    progress: Progress | None,
    *,
    seed: int,
    evaluation: EvaluationSettings,
    training: TrainingSettings,
    model: str,
) -> Verdict:
    """Let the evidence decide: worlds and then recorded play; without worlds, play or a canary.

    Both policies answer through the engine that serves, if there is one.
    """
    if serving.policy_version == trained.policy_version:  # deployed before a crash
        serving = await get_policy(store, trained.parent_version)
    own, candidate = trained.policy_version, await get_policy(store, trained.policy_version)
    await asyncio.to_thread(fetch_checkpoint, store.home, candidate.uri)  # for recorded play
    name = f"{seed}:{trained.batch_id}"
    if evaluation.evaluator:
        from babylon.evaluation.tasks.task_gate import task_verdict  # imports openai, for 2 s

        return await task_verdict(
            store,
            trained,
            route_version,
            serving,
            candidate,
            progress,
            name=evaluation.evaluator,
            seed=name,
            budget=evaluation.scenarios,
            model=model,
        )
    worlds = await gate_worlds(store, trained.claim.window_id, name, evaluation)
    if worlds is None:
        played = await held_out_check(store, trained, training)
        return recorded_verdict(trained, route_version, played)
    players = [policy_player(store.home, one, seed) for one in (serving, candidate)]
    async with entered(store, model, seed, players) as (old, new):
        match = await compare(old, new, worlds, progress)
        won = match.ruling == "promote"
        check = await held_out_check(store, trained, training) if won else None
        suite = await asyncio.to_thread(digest, worlds.scenarios)
        verdict = match_verdict(trained, route_version, match, suite, check)
        siblings = await list_siblings(store, batch_id=trained.batch_id)
        verdict = replace(verdict, siblings=fitness_by_member(siblings))
        if verdict.promote:
            both = {serving.policy_version: old, own: new}
            verdict = withheld(verdict, await frozen_check(store, worlds, both, own, seed))
    place = claim_name(verdict.claim)
    return await asyncio.to_thread(reported, store.home, verdict, match, worlds.scenarios, place)


async def _earlier_verdict(store: Store, trained: Trained, serving: Policy) -> Verdict | None:
    """Return the verdict of an earlier run, if it still holds.

    A rejection is final. A promotion holds if its policy or a descendant serves, or if the champion
    that it is about still does. If the policy was deployed and taken back since, the verdict
    becomes a rejection.
    """
    stored = (await get_policy(store, trained.policy_version)).verdict
    if stored is None:
        return None
    verdict = replace(msgspec.convert(stored, Verdict), claim=trained.claim)
    routes, version = await all_routes(store), trained.policy_version
    if not verdict.promote:
        return verdict
    if version in routes[0].versions or await descends(store, serving.policy_version, version):
        return verdict
    if (route := taken_back(routes, version)) and route.author != RESTORER:
        reason = f"was in force, and taken back by {route.author}: {route.reason}"
        return replace(verdict, promote=False, reason=reason)
    return verdict if same_champion_since(routes, verdict.route_version) else None

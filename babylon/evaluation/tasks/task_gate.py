"""The gate of a task: both policies behind one endpoint, judged by the user's evaluator."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
from openai import AsyncOpenAI

from babylon.core.errors import ArenaError
from babylon.core.trajectories import Trajectory
from babylon.core.types import Trained, Verdict
from babylon.evaluation.arena.engine_players import engine_table
from babylon.evaluation.arena.held_out import held_out_play, trained_hours
from babylon.evaluation.tasks.evaluator import Endpoint, Evaluator, load_evaluator
from babylon.evaluation.tasks.task_match import Heard, TaskMatch, play_task
from babylon.policies.shared_files import fetch_checkpoint
from babylon.store.connection import Store
from babylon.store.policies import Policy


async def task_verdict(
    store: Store,
    trained: Trained,
    route_version: int,
    champion: Policy,
    challenger: Policy,
    progress: Heard | None,
    *,
    name: str,
    seed: str,
    budget: int,
    model: str,
) -> Verdict:
    """Let the checkpoints play the task ``name`` and return the verdict.

    Raises:
        ConfigError: The evaluator cannot be loaded.
        ArenaError: It makes no worlds, or scores out of its bounds.
        ModelError: A checkpoint does not load.
        ServingError: The engine that serves does not load a policy.
    """
    evaluator = await asyncio.to_thread(load_evaluator, name)
    # Dropout leaves plays out of scenarios that the challenger knows from the other plays.
    recorded, problem = await held_out_play(store, trained, await trained_hours(store, trained))
    worlds = await asyncio.to_thread(_worlds, evaluator, seed, budget, recorded)
    if len(worlds) == 0 and not recorded:  # some evaluators need recorded play for their worlds
        return _without_worlds(trained, route_version, name, problem)
    async with served(store, model, champion, challenger) as (old, new):
        match = await play_task(evaluator, old, new, worlds[:budget], progress)
    return _verdict(trained, route_version, match, name)


def _worlds(
    evaluator: Evaluator[object], seed: str, budget: int, recorded: Sequence[Trajectory]
) -> Sequence[object]:
    try:
        worlds = evaluator.worlds(seed, budget, recorded)
    except SystemExit as error:  # it would end the worker without a word
        raise ArenaError("the evaluator's worlds called sys.exit: raise an error") from error
    if not (hasattr(worlds, "__len__") and hasattr(worlds, "__getitem__")):  # arrays are taken too
        raise ArenaError(f"the evaluator's worlds returned a {type(worlds).__name__}: make a list")
    return worlds


def _without_worlds(trained: Trained, route_version: int, name: str, problem: str) -> Verdict:
    """Return the verdict where the evaluator needs recorded play, and there is none.

    A rejection, and no failure that is tried again: it holds the window's play out for later gates.
    """
    return Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=False,
        insufficient=True,
        reason=(
            f"insufficient evidence: EVALUATOR={name} made no worlds, with {problem}, and hours on"
            " which the challenger's line was trained do not count. Let the next windows be"
            " trained: the play of this one judges them"
        ),
        evidence=f"0 worlds of {name}",
    )


def _verdict(trained: Trained, route_version: int, match: TaskMatch, name: str) -> Verdict:
    before, after = (np.array([(s.value, s.malformed) for s in side]) for side in match.sides)
    return Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=match.ruling == "promote",
        insufficient=match.ruling == "insufficient",
        reason=match.reason,
        evidence=f"{len(before)} worlds of {name}",
        scenarios=len(before),
        pnl_before=float(before[:, 0].mean()),
        pnl_after=float(after[:, 0].mean()),
        pnl_difference_low=match.difference.low,
        pnl_difference_high=match.difference.high,
        malformed_before=float(before[:, 1].mean()),
        malformed_after=float(after[:, 1].mean()),
    )


@asynccontextmanager
async def served(store: Store, model: str, *policies: Policy) -> AsyncIterator[list[Endpoint]]:
    """Yield the policies at a gateway, or on loopback by an embedded engine if there is none."""
    async with AsyncExitStack() as stack:
        versions = [policy.policy_version for policy in policies]
        table = await stack.enter_async_context(engine_table(store, model, versions))
        if table is not None:
            url = table.gateways[0].url.rstrip("/")
            client = AsyncOpenAI(base_url=f"{url}/v1", api_key=table.keys[0])
            await stack.enter_async_context(client)
            yield [Endpoint(client=client, model=f"{model}-v{version}") for version in versions]
            return
        # Imported here because torch takes seconds to import.
        from babylon.serving.engine.embedded import EmbeddedEngine

        engine = EmbeddedEngine()
        stack.push_async_callback(engine.close)
        client = AsyncOpenAI(base_url=await engine.start(), api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        for policy in policies:
            path = await asyncio.to_thread(fetch_checkpoint, store.home, policy.uri)
            await engine.load(f"policy-{policy.policy_version}", path, policy.policy_version)
        yield [Endpoint(client=client, model=f"policy-{version}") for version in versions]

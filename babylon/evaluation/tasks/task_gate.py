"""The gate of a task: both checkpoints behind one endpoint, judged by the user's evaluator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from openai import AsyncOpenAI

from babylon.core.types import Trained, Verdict
from babylon.evaluation.arena.held_out import held_out_play
from babylon.evaluation.tasks.evaluator import Endpoint, load_evaluator
from babylon.evaluation.tasks.task_match import Heard, TaskMatch, play_task
from babylon.store.connection import Store


async def task_verdict(
    store: Store,
    trained: Trained,
    route_version: int,
    champion: str,
    progress: Heard | None,
    *,
    name: str,
    seed: str,
    budget: int,
) -> Verdict:
    """Let the checkpoints play the task ``name`` and return the verdict.

    Raises:
        ConfigError: The evaluator cannot be loaded.
        ArenaError: It makes no worlds, or scores out of its bounds.
        ModelError: A checkpoint does not load.
    """
    evaluator = await asyncio.to_thread(load_evaluator, name)
    recorded, _ = await held_out_play(store, trained)
    worlds = await asyncio.to_thread(evaluator.worlds, seed, budget, recorded)
    async with served(champion, store.home.resolve(trained.checkpoint_uri)) as (old, new):
        match = await play_task(evaluator, old, new, worlds[:budget], progress)
    return _verdict(trained, route_version, match, name)


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
async def served(champion: str, challenger: str) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """Serve two checkpoints on loopback by the embedded engine while the block runs."""
    # Imported here because torch takes seconds to import.
    from babylon.serving.engine.embedded import EmbeddedEngine

    engine = EmbeddedEngine()
    try:
        url = await engine.start()
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for number, path in enumerate((champion, challenger)):
                await engine.load(f"policy-{number}", path, number)
            yield (
                Endpoint(client=client, model="policy-0"),
                Endpoint(client=client, model="policy-1"),
            )
    finally:
        await engine.close()

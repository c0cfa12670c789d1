"""Prefect's global concurrency limits: what several runs may use at a time.

``babylon up`` creates each with one slot, and a person raises them in Prefect's UI. A limit that
does not exist limits nothing. An inline run without a Prefect server has none, and asks for none.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prefect.concurrency.asyncio import concurrency
from prefect.context import TaskRunContext
from prefect.settings import PREFECT_API_URL

from babylon.core.settings import JudgeSettings
from babylon.scoring.judge.panel_members import panel_members
from babylon.scoring.scorer import NEEDS_JUDGE

GPU_MEMORY = "babylon-gpu-memory"  # a slot is the memory of one stage with a model
LEASE_S = 60.0  # after which the slots of a machine that died are free
JUDGE = "babylon-judge"  # a slot is one window at a time


@asynccontextmanager
async def limited(*names: str) -> AsyncIterator[None]:
    """Hold a slot of each limit while the block runs. The slots of a dead run free themselves."""
    async with AsyncExitStack() as stack:
        # Prefect keeps its client for limits as long as a process lives. Each ephemeral server of
        # an inline run is another one, and the client would wait for the first.
        if names and TaskRunContext.get() is not None and PREFECT_API_URL.value():
            held = concurrency(list(names), lease_duration=LEASE_S)
            await stack.enter_async_context(held)
        yield


def limits_of_scoring(scorer: str, judge: JudgeSettings) -> tuple[str, ...]:
    """Return the limits of a scorer, of all judges of its panel.

    A process keeps to ``JUDGE_REQUESTS_PER_MINUTE`` by itself. One window at a time makes the rate
    hold for all runs. A judge on this machine also shares the GPU with training.
    """
    if scorer == "art-ruler":
        return (JUDGE,)
    if scorer not in NEEDS_JUDGE:
        return ()
    here = {one.model_path is not None for one in panel_members(judge)}
    return tuple(GPU_MEMORY if local else JUDGE for local in sorted(here))

"""Train: one GRPO update of the champion, committed as a new policy version."""

import asyncio
import threading

from babylon.core.settings import Settings
from babylon.core.types import Scored, Trained
from babylon.stages.train import train_window
from babylon.store import open_store
from babylon.tasks.limits import GPU_MEMORY, limited
from babylon.tasks.page import leave_page
from babylon.tasks.progress import announce
from babylon.tasks.stage import stage
from babylon.training.update_health import update_markdown


@stage("train")
async def train(settings: Settings, scored: Scored, member: int | None = None) -> Trained | None:
    """Train, commit and leave a page. After the commit the window's trajectories are consumed.

    An evaluator that does not load raises its error before the update.

    With ``member``, train only this one of a population: it is neither committed nor has a page.

    The update computes in a thread, which cannot be interrupted: on cancellation it ends itself at
    its next train step.
    """
    cancelled = threading.Event()

    def step(done: int, total: int) -> None:
        if cancelled.is_set():
            raise InterruptedError(f"training was cancelled at step {done} of {total}")
        announce("train", done, total)

    if settings.evaluation.evaluator:  # its gate comes after the update, which takes long
        from babylon.evaluation.tasks.evaluator import load_evaluator  # imports openai, for 2 s

        await asyncio.to_thread(load_evaluator, settings.evaluation.evaluator)
    async with limited(GPU_MEMORY), open_store(settings) as store:
        try:
            trained = await train_window(store, settings, scored, progress=step, member=member)
        except asyncio.CancelledError:
            cancelled.set()
            raise
    if trained is None:
        return None
    window_id, version = trained.claim.window_id, trained.policy_version
    page = update_markdown(window_id, version, trained.parent_version, trained.metrics)
    await leave_page("update", window_id, page, f"how policy {version} was trained")
    return trained

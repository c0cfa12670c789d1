"""Train: one GRPO update of the champion, committed as a new policy version."""

import asyncio
import threading

from babylon.settings import Settings
from babylon.store import open_store
from babylon.train import train_window
from babylon.types import Scored, Trained
from tasks.stage import announce, stage
from tasks.update_artifact import leave_update


@stage("train")
async def train(settings: Settings, scored: Scored) -> Trained:
    """From the commit on the window's trajectories are consumed, whatever becomes of the policy.

    The update computes in a thread, which nobody can interrupt: cancelled, it ends itself at the
    next step. How it went is left as a Prefect artifact.
    """
    cancelled = threading.Event()

    def step(done: int, total: int) -> None:
        if cancelled.is_set():
            raise InterruptedError(f"training was cancelled at step {done} of {total}")
        announce("train", done, total)

    async with open_store(settings) as store:
        try:
            trained = await train_window(store, settings, scored, progress=step)
        except asyncio.CancelledError:
            cancelled.set()
            raise
    await leave_update(trained)
    return trained

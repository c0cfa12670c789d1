"""Train: one GRPO update of the champion, committed as a new policy version."""

from babylon.settings import Settings
from babylon.store import open_store
from babylon.train import train_window
from babylon.types import Scored, Trained
from tasks.stage import stage


@stage("train")
async def train(settings: Settings, scored: Scored) -> Trained:
    """From here on the window's trajectories are consumed, whatever becomes of the policy."""
    async with open_store(settings) as store:
        return await train_window(store, settings, scored)

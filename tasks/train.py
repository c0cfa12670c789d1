"""Train: one GRPO update of the champion, committed as a new policy version."""

from babylon.settings import Settings
from babylon.store import open_store
from babylon.types import Scored, Trained
from tasks.stage import stage


@stage("train")
async def train(settings: Settings, scored: Scored) -> Trained:
    """Torch is imported here, so that parents on the cpu pool never load it."""
    from babylon.train import train_window

    async with open_store(settings) as store:
        return await train_window(store, settings, scored)

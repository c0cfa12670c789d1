"""Validate checkpoint: challenger and champion play the same unseen scenarios."""

from babylon import gate
from babylon.settings import Settings
from babylon.store import open_store
from babylon.types import Trained, Verdict
from tasks.stage import stage


@stage("validate checkpoint")
async def validate_checkpoint(settings: Settings, trained: Trained) -> Verdict:
    """The verdict is stored with the policy, promoted or not."""
    async with open_store(settings) as store:
        return await gate.validate_checkpoint(store, settings, trained)

"""Validate checkpoint: challenger and champion play the same unseen scenarios."""

from babylon.settings import Settings
from babylon.store import open_store
from babylon.types import Trained, Verdict
from tasks.stage import stage


@stage("validate checkpoint")
async def validate_checkpoint(settings: Settings, trained: Trained) -> Verdict:
    """Torch is imported here, so that parents on the cpu pool never load it."""
    from babylon import validation

    async with open_store(settings) as store:
        return await validation.validate_checkpoint(store, settings, trained)

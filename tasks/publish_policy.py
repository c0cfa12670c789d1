"""Publish policy: the champion to its model repository, if one is set."""

from babylon.core.settings import Settings
from babylon.dataset.publish_policy import PublishedPolicy
from babylon.dataset.publish_policy import publish_policy as publish_champion
from babylon.store import open_store
from babylon.tasks.stage import stage


@stage("publish policy")
async def publish_policy(settings: Settings) -> PublishedPolicy | None:
    """Return what was sent, None if no repository is set or it has the champion."""
    if settings.publish.models is None:
        return None
    async with open_store(settings) as store:
        return await publish_champion(store, settings.home, settings.publish)

"""Publish policy: the champion to its model repository, if one is set."""

from babylon.core.settings import PublishSettings
from babylon.dataset.publish_policy import PublishedPolicy
from babylon.dataset.publish_policy import publish_policy as publish_champion
from babylon.store import Store
from babylon.tasks.stage import stage


@stage("publish policy")
async def publish_policy(store: Store, publish: PublishSettings) -> PublishedPolicy | None:
    """Return what was sent, None if no repository is set or it has the champion."""
    if publish.models is None:
        return None
    return await publish_champion(store, store.home, publish)

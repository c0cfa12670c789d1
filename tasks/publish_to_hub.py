"""Publish to the hub: one commit for each day of play that the repository lacks."""

from datetime import date

from babylon.core.settings import PublishSettings
from babylon.dataset.publish import PublishedDay, publish_days
from babylon.store import Store
from babylon.tasks.stage import stage


@stage("publish to hub")
async def publish_to_hub(
    store: Store, publish: PublishSettings, before: date
) -> list[PublishedDay]:
    """Publish the windows that were played before a day."""
    return await publish_days(store, store.home, publish, before=before)

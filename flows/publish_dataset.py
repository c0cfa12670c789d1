"""Publish dataset: once a day, the windows that finished and are not published yet."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from prefect import flow
from prefect.runtime import flow_run

from babylon.blocks.form import BlockName, PublishForm
from babylon.blocks.load import settings_with
from babylon.core.types import Published
from babylon.dataset.build import windows_of
from babylon.store import open_store
from babylon.tasks.publish import publish
from babylon.tasks.publish_to_hub import publish_to_hub


def yesterday() -> date:
    return (datetime.now(UTC) - timedelta(days=1)).date()


@flow(
    name="publish-dataset",
    flow_run_name=lambda: str(flow_run.parameters["day"] or yesterday()),
)
async def publish_dataset(
    day: date | None = None,
    overrides: PublishForm = None,
    blocks: Sequence[BlockName] = (),
) -> list[Published]:
    """Write the files of the windows of a UTC day, by default yesterday, and publish to the hub.

    With PUBLISH_TO set, every window up to that day that the repository lacks is published, one
    commit a day of play; a window that finished after its day's commit goes with the next. A day
    that failed is therefore published by the next run.

    Args:
        day: The day of play in UTC.
        overrides: Settings of this run, by group.
        blocks: Names of blocks to take settings from (``babylon-database/live``).
    """
    settings = await settings_with(overrides, blocks)
    async with open_store(settings) as store:
        scored = await windows_of(store, day or yesterday())
        written: list[Published] = []
        if settings.publish.repository:
            before = (day or yesterday()) + timedelta(days=1)
            for sent in await publish_to_hub(store, settings.publish, before):
                written += sent.written(settings.home)
        have = {file.window_id for file in written}
        # Last: a window that cannot be written fails this run, and holds up no commit.
        for one in scored:
            if one.claim.window_id not in have:
                written += await publish(settings, one)
        return written

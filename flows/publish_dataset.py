"""Publish dataset: once a day, the trained windows of yesterday."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from prefect import flow
from prefect.runtime import flow_run

from babylon.blocks.load import Overrides, settings_with
from babylon.core.types import Published
from babylon.dataset.build import windows_of
from babylon.store import open_store
from babylon.tasks.publish import publish


def yesterday() -> date:
    return (datetime.now(UTC) - timedelta(days=1)).date()


@flow(
    name="publish-dataset",
    flow_run_name=lambda: str(flow_run.parameters["day"] or yesterday()),
)
async def publish_dataset(
    day: date | None = None,
    overrides: Overrides | None = None,
    blocks: Sequence[str] = (),
) -> list[Published]:
    """Write the Parquet file of each trained window of a UTC day, by default yesterday.

    A window that was published before gets the same file again.
    """
    settings = await settings_with(overrides, blocks)
    async with open_store(settings) as store:
        scored = await windows_of(store, day or yesterday())
    return [await publish(settings, one) for one in scored]

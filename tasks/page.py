"""Pages in Prefect's UI: one key a kind of page, and a version for each window."""

import asyncio
from datetime import timedelta

from prefect.artifacts import acreate_markdown_artifact

from babylon.ops.pages.fleet_facts import read_fleet, read_night
from babylon.ops.pages.fleet_page import fleet_markdown, night_markdown
from babylon.ops.pages.window_facts import read_window_facts
from babylon.ops.pages.window_page import window_markdown
from babylon.store import Store
from babylon.store.connection import read_clock
from babylon.tasks.stage import stage

NIGHT = timedelta(hours=12)


async def leave_page(kind: str, name: str, markdown: str, description: str) -> None:
    """Add a version to the page ``kind``. ``name``: the window or experiment that it is about."""
    await acreate_markdown_artifact(markdown, key=kind, description=f"{name}: {description}")


@stage("pages")
async def leave_pages(store: Store, window_id: str) -> None:
    """Leave the pages ``window``, ``fleet`` and ``tonight`` as they are after a window's run."""
    facts = await read_window_facts(store, window_id)
    fleet = await read_fleet(store)
    night = await read_night(store, (await read_clock(store)).now - NIGHT)
    if facts is not None:
        page = await asyncio.to_thread(window_markdown, facts)
        await leave_page("window", window_id, page, str(facts.row.state))
    page = await asyncio.to_thread(fleet_markdown, fleet)
    await leave_page("fleet", window_id, page, f"the newest {len(fleet)} windows")
    await leave_page("tonight", window_id, night_markdown(night), "the last twelve hours")

"""A lease, watched from beside the run that holds it."""

import asyncio

from babylon.store import Store


async def until_renewed(store: Store) -> None:
    """Wait for the next renewal of the only window's lease."""
    lease = "SELECT lease_until FROM babylon.windows"
    before = await store.pool.fetchval(lease)
    async with asyncio.timeout(60):
        while await store.pool.fetchval(lease) == before:
            await asyncio.sleep(0.05)

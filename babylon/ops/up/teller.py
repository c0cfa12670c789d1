"""Alerts, news and lineage, for a supervisor and for the workers of the pool ``cpu`` elsewhere."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

import aiohttp

from babylon.core.settings import Settings
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.alerts import set_up_alerts
from babylon.ops.up.news import tell_news
from babylon.ops.up.turns import setting_up
from babylon.store import Store, open_store

RETRY_S = 15.0  # Prefect may be away, or lack the block of ALERT_BLOCK
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Teller:
    """The teller of the windows in the database that ``settings`` name."""

    settings: Settings
    http: aiohttp.ClientSession
    api: PrefectApi

    @property
    def _opening(self) -> Callable[[], AbstractAsyncContextManager[Store]]:
        return partial(open_store, self.settings, game_may_be_away=True)

    async def set_up_alerts(self) -> None:
        """Make the automations of ``ALERT_BLOCK``, after other processes that do the same.

        Raises:
            BabylonError: the block does not exist, or Prefect or the database does not answer.
        """
        block, minutes = self.settings.prefect.alerts, self.settings.windows.minutes
        async with self._opening() as store, setting_up(store):
            await set_up_alerts(self.http, self.api, block, minutes)

    async def tell(self) -> None:
        """Send news to Prefect, and lineage to ``OPENLINEAGE_URL``, until cancelled."""
        work = [tell_news(self._opening, self.settings.windows, self.http, self.api)]
        tracking, database = self.settings.tracking, self.settings.database
        if tracking.lineage_url:
            from babylon.ops.up.lineage import tell_lineage  # its client costs half a second

            game = database.game_url or database.url
            work.append(tell_lineage(self._opening, tracking, self.settings.model.name, game))
        await asyncio.gather(*work)

    async def set_up_and_tell(self) -> None:
        """Do both until cancelled. A problem of the alerts is logged, and tried again."""
        await asyncio.gather(self.tell(), self._until_set_up())

    async def _until_set_up(self) -> None:
        while True:
            try:
                return await self.set_up_alerts()
            except Exception as error:  # nothing here may end the worker
                log.warning("alerts: %s; tried again in %.0f s", error, RETRY_S)
                await asyncio.sleep(RETRY_S)

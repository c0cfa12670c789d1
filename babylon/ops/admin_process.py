"""The admin process: API and status page on loopback, settings from the environment."""

import asyncio
import logging
import signal
import sys

import uvicorn

from babylon.core.errors import BabylonError
from babylon.core.processes import exit_with_supervisor
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.deployment.admin.app import admin_app
from babylon.deployment.change import checks_under
from babylon.ops.status_page.app import StatusPage
from babylon.serving.gateway.http_guard import server_config
from babylon.store import open_store


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    async with open_store(settings, game_may_be_away=True) as store:
        supervised = asyncio.create_task(exit_with_supervisor())
        # uvicorn raises the signal again after it stopped, which must not end the cleanup here.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        checks = checks_under(settings)
        publishes = settings.publish.repository is not None
        admin = admin_app(store, settings.home, checks, publishes=publishes)
        StatusPage(store, settings.home, checks).add_to(admin)
        config = server_config(admin, host="127.0.0.1", port=settings.serving.admin_port)
        await uvicorn.Server(config).serve()
        supervised.cancel()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(run(load_settings()))
    except BabylonError as error:
        sys.exit(f"admin: {error}")


if __name__ == "__main__":
    main()

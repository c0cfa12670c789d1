"""The gateway process: settings from the environment, uvicorn on loopback."""

import asyncio
import logging
import platform
import sys

import uvicorn

from babylon.errors import BabylonError
from babylon.gateway.app import open_gateway
from babylon.settings import Settings, load_settings
from babylon.store import open_store


async def run(settings: Settings) -> None:
    """Serve until the process is told to stop."""
    port = settings.endpoint_port
    async with (
        open_store(settings) as store,
        open_gateway(
            store,
            engine_url=f"http://127.0.0.1:{settings.engine_port}",
            alias=settings.model_name,
            gateway_id=f"{platform.node()}:{port}",
            url=settings.endpoint,
        ) as gateway,
    ):
        config = uvicorn.Config(
            gateway,  # type: ignore[arg-type]  # uvicorn's scope is a union of typed dicts
            host="127.0.0.1",
            port=port,
            lifespan="off",
            ws="none",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=10,
            log_config=None,
        )
        await uvicorn.Server(config).serve()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(run(load_settings()))
    except BabylonError as error:
        sys.exit(f"gateway: {error}")


if __name__ == "__main__":
    main()

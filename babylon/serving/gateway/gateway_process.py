"""The gateway process: settings from the environment, uvicorn on loopback."""

import asyncio
import gc
import logging
import signal
import sys

import uvicorn
import uvloop

from babylon.core.errors import BabylonError
from babylon.core.settings import Settings, load_settings
from babylon.serving.gateway.app import Gateway, open_gateway
from babylon.serving.gateway.http_guard import server_config
from babylon.serving.gateway.identity import new_gateway_id, remove_dead
from babylon.serving.supervise import exit_with_supervisor
from babylon.store import open_store


async def run(settings: Settings) -> None:
    """Serve until the process is told to stop."""
    port = settings.serving.endpoint_port
    gateway_id = new_gateway_id(port)
    async with open_store(settings) as store:
        await remove_dead(store, gateway_id)
        async with open_gateway(
            store,
            settings,
            engine_url=f"http://127.0.0.1:{settings.serving.engine_port}",
            gateway_id=gateway_id,
            url=settings.serving.endpoint,
        ) as gateway:
            await _serve(gateway, port)


async def _serve(gateway: Gateway, port: int) -> None:
    gc.freeze()  # what is there now stays: no collection need look at it again
    gc.set_threshold(10_000)  # calls leave hardly any cycles: 3 % of their cost was looking
    supervised = asyncio.create_task(exit_with_supervisor())
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops, then raises it again:
        signal.signal(number, lambda *_: None)  # that must not end us before we tidied up
    await uvicorn.Server(server_config(gateway, host="127.0.0.1", port=port)).serve()
    supervised.cancel()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(load_settings()))
    except BabylonError as error:
        sys.exit(f"gateway: {error}")


if __name__ == "__main__":
    main()

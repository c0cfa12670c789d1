"""The engine process for ``ENGINE=vllm``: it starts and looks after vLLM servers.

It implements ``babylon.serving.engine_protocol``. Calls go to the servers directly.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator

import aiohttp
import msgspec
from aiohttp import web

from babylon.core.errors import BabylonError, ModelError, ServingError
from babylon.core.home import Home
from babylon.core.processes import exit_with_supervisor
from babylon.core.settings import ServingSettings, load_settings
from babylon.serving.engine_protocol import PolicySource, json_response, openai_errors
from babylon.serving.openai_wire import RequestError
from babylon.serving.vllm.build import mixes_base_with_adapters
from babylon.serving.vllm.command import require_vllm
from babylon.serving.vllm.vllm_fleet import VllmFleet

FLEET = web.AppKey("fleet", VllmFleet)


def make_app(serving: ServingSettings, home: Home, prefect_port: int) -> web.Application:
    """Return the host's HTTP application. Its servers stop with it.

    Raises:
        ConfigError: the settings name no vLLM.
    """
    adapters_apart = mixes_base_with_adapters(require_vllm(serving))
    app = web.Application(middlewares=[openai_errors])

    async def run_fleet(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as http:
            app[FLEET] = VllmFleet(
                http,
                serving,
                logs=home.logs,
                reserved_ports=(prefect_port,),
                adapters_apart=adapters_apart,
            )
            yield
            await app[FLEET].close()

    async def watch_supervisor(app: web.Application) -> AsyncIterator[None]:
        watch = asyncio.create_task(exit_with_supervisor())
        yield
        watch.cancel()

    app.cleanup_ctx.extend([run_fleet, watch_supervisor])
    app.add_routes(
        [
            web.get("/health", _health),
            web.get("/v1/models", _models),
            web.put("/policies/{name:.+}", _load),
            web.delete("/policies/{name:.+}", _unload),
        ]
    )
    return app


async def _health(request: web.Request) -> web.Response:
    servers = request.app[FLEET].describe()
    status = "ok" if all(server["up"] for server in servers) else "starting"
    names = request.app[FLEET].names
    return json_response({"status": status, "policies": names, "servers": servers})


async def _models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": await request.app[FLEET].ready()})


async def _load(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    try:
        source = msgspec.json.decode(await request.read(), type=PolicySource)
        return json_response(await request.app[FLEET].load(name, source.path, source.version))
    except (msgspec.DecodeError, ModelError) as error:
        raise RequestError(400, str(error)) from error
    except RequestError as error:  # vLLM's own statuses mean something else in this protocol
        raise RequestError(409 if error.status == 409 else 400, str(error)) from error
    except ServingError as error:
        raise RequestError(503, str(error), code="unavailable") from error


async def _unload(request: web.Request) -> web.Response:
    await request.app[FLEET].unload(request.match_info["name"])
    return web.Response(status=204)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = load_settings()
        app = make_app(settings.serving, settings.home, settings.prefect.port)
    except BabylonError as error:
        sys.exit(f"vLLM host: {error}")
    web.run_app(
        app,
        host="127.0.0.1",
        port=settings.serving.engine_port,
        handler_cancellation=True,
        shutdown_timeout=1,
        access_log=None,
        print=None,
    )


if __name__ == "__main__":
    main()

"""The engine process for ``ENGINE=vllm``: it starts and looks after vLLM servers.

It implements ``babylon.serving.engine_protocol``. Calls go to the servers directly.
"""

import asyncio
import logging
import os.path
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from babylon.core.api_keys import engine_secret
from babylon.core.errors import (
    ArtifactError,
    BabylonError,
    ModelError,
    ServingError,
    StorageError,
)
from babylon.core.home import Home
from babylon.core.settings import ServingSettings
from babylon.core.settings_loading import load_settings
from babylon.policies.checkpoint_files import shape_of
from babylon.policies.shared_files import fetch_checkpoint
from babylon.serving.engine_protocol import (
    PolicyCard,
    PolicySource,
    engine_app,
    json_response,
    name_taken,
    run_engine,
)
from babylon.serving.openai_wire import RequestError
from babylon.serving.vllm.command import (
    free_port,
    is_cpu_build,
    require_vllm,
    vllm_service,
)
from babylon.serving.vllm.vllm_client import VllmClient
from babylon.serving.vllm.vllm_server import VllmPolicy, VllmServer, read_policy

log = logging.getLogger(__name__)

Key = tuple[str, bool]  # base model, or its shape; True if the server is for its adapters only
_ANY: Key = ("", False)  # of the server at ENGINE_URL, whatever it serves
AGAIN_S = 10.0  # longer than a gateway pauses between two loads


class VllmFleet:
    """vLLM servers by their base model, or the one server at ``ENGINE_URL``.

    ``reserved_ports``: ports of other services. ``secret``: the servers that it starts answer only
    to it. ``cpu``: as ``is_cpu_build``; a model and its adapters then do not share a server.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        serving: ServingSettings,
        *,
        logs: Path,
        reserved_ports: Sequence[int],
        secret: str,
        cpu: bool,
    ) -> None:
        self._http, self._serving, self._logs, self._secret = http, serving, logs, secret
        self._reserved_ports, self._cpu = reserved_ports, cpu
        self._servers: dict[Key, VllmServer] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._stopping: set[VllmServer] = set()
        if serving.engine_url:
            url = serving.engine_url.rstrip("/")
            self._servers[_ANY] = VllmServer(VllmClient(http, url), None)

    async def load(self, name: str, path: str, version: int) -> PolicyCard:
        """Load a checkpoint under a new name, and wait until it answers. The same again is a no-op.

        Raises:
            ModelError: the checkpoint is not there, or its server does not start.
            RequestError: 409, the name stands for another checkpoint; 400, vLLM refuses it.
            ServingError: no port is free, or the server at ``ENGINE_URL`` does not answer.
        """
        policy = read_policy(name, path, version)
        known, _ = self._find(name)
        if known and known != policy:
            raise name_taken(name, known.version, known.path, path)
        base = policy.base
        if self._takes_turns(policy):
            base = await asyncio.to_thread(shape_of, policy.base)
        apart = self._cpu or self._serving.vllm_turns
        key = (base, policy.is_adapter and apart)
        if self._serving.engine_url:
            key = _ANY
        server = self._servers.get(key) or self._start(key, policy)
        try:
            await server.load(policy)
        except ModelError:
            await self._stop(key, server)
            raise
        except BaseException:  # a cancellation too, or the server would run on without a policy
            self._retire_if_idle(key, server)
            raise
        return _card(policy, server, (await server.ready()).get(name, name))

    async def unload(self, name: str) -> None:
        """Unload a policy, and stop its server if it was the last.

        Raises:
            RequestError: 404, unknown policy.
        """
        known, key = self._find(name)
        if known is None:
            raise RequestError(
                404, f"policy {name!r} is not loaded; loaded: {', '.join(self.names) or 'none'}"
            )
        server = self._servers[key]
        try:
            await server.unload(name)
        finally:  # also if the gateway does not wait for the answer of a busy server
            self._retire_if_idle(key, server)

    async def ready(self) -> list[PolicyCard]:
        """Return the policies that can answer now."""
        servers = list(self._servers.values())
        found = await asyncio.gather(*(server.ready() for server in servers))
        return [
            _card(server.policies[name], server, model)
            for server, models in zip(servers, found, strict=True)
            for name, model in models.items()
            if name in server.policies
        ]

    @property
    def names(self) -> list[str]:
        return [name for server in self._servers.values() for name in server.policies]

    def describe(self) -> list[dict[str, object]]:
        """Return the state of each server, for ``/health``."""
        return [
            {
                "base": base or None,
                "url": server.client.url,
                "up": server.up,
                "policies": list(server.policies),
                "log": str(server.service.log) if server.service else None,
            }
            for (base, _), server in self._servers.items()
        ]

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        servers = (*self._servers.values(), *self._stopping)
        await asyncio.gather(*(server.stop() for server in servers))

    def _find(self, name: str) -> tuple[VllmPolicy | None, Key]:
        for key, server in self._servers.items():
            if known := server.policies.get(name):
                return known, key
        return None, _ANY

    def _takes_turns(self, policy: VllmPolicy) -> bool:
        return self._serving.vllm_turns and not policy.is_adapter

    def _start(self, key: Key, policy: VllmPolicy) -> VllmServer:
        taken = [urlsplit(server.client.url).port or 0 for server in self._servers.values()]
        port = free_port(self._serving, [*taken, *self._reserved_ports])
        name = policy.base if policy.is_adapter else policy.name
        turns = self._takes_turns(policy)
        service = vllm_service(
            self._serving,
            *(policy.base, name, port),
            logs=self._logs,
            secret=self._secret,
            turns=turns,
            cpu=self._cpu,
        )
        log.info("starting the %s on port %d; log: %s", service.name, port, service.log)
        client = VllmClient(self._http, f"http://127.0.0.1:{port}", self._secret, turns=turns)
        on_disk = os.path.isabs(policy.base)  # and no id of the Hugging Face hub
        server = VllmServer(client, service, policy.base if turns and on_disk else None)
        self._servers[key] = server
        return server

    def _retire_if_idle(self, key: Key, server: VllmServer) -> None:
        if server.idle and server.service:
            task = asyncio.create_task(self._retire(key, server))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, key: Key, server: VllmServer) -> None:
        if not server.up:  # a start may outlast a load, which the gateway then asks for again
            await asyncio.sleep(AGAIN_S)
        await server.drained()
        if server.idle:  # no policy was loaded while it drained
            await self._stop(key, server)

    async def _stop(self, key: Key, server: VllmServer) -> None:
        if self._servers.get(key) is server:
            del self._servers[key]
            log.info("stopping the vLLM server of %s at %s", key[0], server.client.url)
            self._stopping.add(server)
            await server.stop()
            self._stopping.discard(server)


def _card(policy: VllmPolicy, server: VllmServer, model: str) -> PolicyCard:
    return PolicyCard(
        id=policy.name,
        object="model",
        owned_by="vllm",
        root=policy.path,
        version=policy.version,
        url=server.client.calls_at(policy.name),
        model=None if model == policy.name else model,
        foreign=server.service is None,
    )


FLEET = web.AppKey("fleet", VllmFleet)
HOME = web.AppKey("home", Home)


def make_app(serving: ServingSettings, home: Home, prefect_port: int) -> web.Application:
    """Return the host's HTTP application. Its servers stop with it.

    Raises:
        ConfigError: the settings name no vLLM.
    """
    cpu = is_cpu_build(require_vllm(serving))
    secret = engine_secret(home.root)

    async def run_fleet(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as http:
            app[FLEET] = VllmFleet(
                http,
                serving,
                logs=home.logs,
                reserved_ports=(prefect_port,),
                secret=secret,
                cpu=cpu,
            )
            yield
            await app[FLEET].close()

    app = engine_app(run_fleet, _health, _models, _load, _unload)
    app[HOME] = home
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
        home = request.app[HOME]
        path = await asyncio.to_thread(fetch_checkpoint, home, home.resolve(source.path))
        return json_response(await request.app[FLEET].load(name, path, source.version))
    except (msgspec.DecodeError, ModelError, ArtifactError, StorageError) as error:
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
    secret = engine_secret(settings.home.root)
    run_engine(app, settings.serving.engine_port, secret, shutdown_timeout_s=1)


if __name__ == "__main__":
    main()

"""Which vLLM server answers for which policy; servers come and go with the models they serve.

A model and all adapters on it share a server, unless this vLLM would mix them up. A model that no
server has gets one next to the others, and a server stops when nobody needs it and what it had
begun is answered: new full weights start beside the old ones (blue/green), so both must fit.
"""

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from babylon.core.errors import ModelError
from babylon.core.settings import Settings
from babylon.serving.engine_protocol import PolicyCard
from babylon.serving.openai_wire import RequestError
from babylon.serving.vllm.command import free_port, vllm_service
from babylon.serving.vllm.vllm_client import VllmClient
from babylon.serving.vllm.vllm_policy import Policy, read_policy
from babylon.serving.vllm.vllm_server import Server

log = logging.getLogger(__name__)

Key = tuple[str, bool]  # base model, and whether the server is for adapters on it alone
_ANY: Key = ("", False)  # of a server that is not ours: it serves what it serves


class Fleet:
    """vLLM servers by the model they were started with; or one that runs at ``ENGINE_URL``.

    ``adapters_apart``: a model and adapters on it must not share a server.
    """

    def __init__(
        self, http: aiohttp.ClientSession, settings: Settings, *, adapters_apart: bool
    ) -> None:
        self._http, self._settings, self._adapters_apart = http, settings, adapters_apart
        self._servers: dict[Key, Server] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        if settings.serving.engine_url:
            url = settings.serving.engine_url.rstrip("/")
            self._servers[_ANY] = Server(VllmClient(http, url), None)

    async def load(self, name: str, path: str, version: int) -> PolicyCard:
        """Load a checkpoint under a new name, and wait until it answers; the same is a no-op.

        Raises:
            ModelError: there is no such checkpoint, or its server does not start.
            RequestError: 409, the name means another checkpoint; 400, vLLM refuses it.
            ServingError: a server cannot be started, or one that is not ours does not answer.
        """
        policy = read_policy(name, path, version)
        known, _ = self._find(name)
        if known and known != policy:
            raise RequestError(
                409,
                f"{name!r} is version {known.version} of {known.path}: load {path} under"
                " another name",
            )
        key = (policy.base, policy.is_adapter and self._adapters_apart)
        if self._settings.serving.engine_url:
            key = _ANY
        server = self._servers.get(key) or self._start(key, policy)
        try:
            await server.load(policy)
        except ModelError:
            await self._stop(key, server)
            raise
        except RequestError:
            self._retire_if_idle(key, server)
            raise
        return _card(policy, server, (await server.ready()).get(name, name))

    async def unload(self, name: str) -> None:
        """
        Raises:
            RequestError: 404, there is no such policy.
        """
        known, key = self._find(name)
        if known is None:
            raise RequestError(
                404, f"policy {name!r} is not loaded: there is {', '.join(self.names) or 'none'}"
            )
        server = self._servers[key]
        await server.unload(name)
        self._retire_if_idle(key, server)

    async def ready(self) -> list[PolicyCard]:
        """The policies that can answer now."""
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

    def describe(self) -> list[dict[str, Any]]:
        """Each server, and whether it answers."""
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
        await asyncio.gather(*(server.stop() for server in self._servers.values()))

    def _find(self, name: str) -> tuple[Policy | None, Key]:
        for key, server in self._servers.items():
            if known := server.policies.get(name):
                return known, key
        return None, _ANY

    def _start(self, key: Key, policy: Policy) -> Server:
        taken = [urlsplit(server.client.url).port or 0 for server in self._servers.values()]
        port = free_port(self._settings, taken)
        name = policy.base if policy.is_adapter else policy.name
        service = vllm_service(self._settings, policy.base, name, port)
        log.info("starting the %s on port %d; log: %s", service.name, port, service.log)
        server = Server(VllmClient(self._http, f"http://127.0.0.1:{port}"), service)
        self._servers[key] = server
        return server

    def _retire_if_idle(self, key: Key, server: Server) -> None:
        if server.idle and server.service:
            task = asyncio.create_task(self._retire(key, server))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, key: Key, server: Server) -> None:
        await server.drained()
        if server.idle:  # still
            await self._stop(key, server)

    async def _stop(self, key: Key, server: Server) -> None:
        if self._servers.get(key) is server:
            del self._servers[key]
            log.info("stopping the vLLM server of %s at %s", key[0], server.client.url)
            await server.stop()


def _card(policy: Policy, server: Server, model: str) -> PolicyCard:
    return PolicyCard(
        id=policy.name,
        object="model",
        owned_by="vllm",
        root=policy.path,
        version=policy.version,
        url=server.client.url,
        model=None if model == policy.name else model,
    )

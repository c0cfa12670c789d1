"""The engine inside this process: for a program that samples from a policy which it also trains."""

from aiohttp import web

from babylon.serving.engine.engine_process import POLICIES, make_app
from babylon.serving.engine.loaded_policies import LoadedPolicy

EXACT = {"logprobs": True, "return_token_ids": True}  # so that every answer can be trained on


class EmbeddedEngine:
    """An OpenAI endpoint on a free port of loopback; answers carry token ids and logprobs."""

    def __init__(self) -> None:
        self._app = make_app(defaults=EXACT)
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> str:
        """The base URL for an OpenAI client; started once."""
        if self._runner is None:
            self._runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            host, port = self._runner.addresses[0][:2]
            self._url = f"http://{host}:{port}/v1"
        return self._url

    async def load(self, name: str, path: str, version: int) -> None:
        """Serve a checkpoint under a name, from now on and for good.

        Raises:
            ModelError: it does not load.
            RequestError: the name means another checkpoint.
        """
        await self._app[POLICIES].load(name, path, version)

    def unload(self, name: str) -> None:
        """Forget a policy, if it is there."""
        if any(policy.name == name for policy in self._app[POLICIES]):
            self._app[POLICIES].unload(name)

    def policy(self, name: str) -> LoadedPolicy:
        return self._app[POLICIES].get(name)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

"""The engine within a program that samples from a policy and trains it."""

from aiohttp import web

from babylon.serving.engine.engine_process import POLICIES, make_app
from babylon.serving.engine.loaded_policies import LoadedPolicy

EXACT = {"logprobs": True, "return_token_ids": True}  # makes every answer exact training data


class EmbeddedEngine:
    """An OpenAI endpoint on a free loopback port. Answers have token ids and logprobs."""

    def __init__(self) -> None:
        self._app = make_app(defaults=EXACT)
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> str:
        """Start the endpoint once, and return the base URL for an OpenAI client."""
        if self._runner is None:
            self._runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            host, port = self._runner.addresses[0][:2]
            self._url = f"http://{host}:{port}/v1"
        return self._url

    async def load(self, name: str, path: str, version: int) -> None:
        """Serve a checkpoint under a name that never changes its meaning.

        Raises:
            ModelError: the checkpoint does not load.
            RequestError: the name stands for another checkpoint.
        """
        await self._app[POLICIES].load(name, path, version)

    def unload(self, name: str) -> None:
        """Unload a policy if it is loaded."""
        if any(policy.name == name for policy in self._app[POLICIES]):
            self._app[POLICIES].unload(name)

    def policy(self, name: str) -> LoadedPolicy:
        return self._app[POLICIES].get(name)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

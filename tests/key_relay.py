"""A relay that adds an API key to each request, for browsers that cannot be told to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web


@asynccontextmanager
async def key_relay(upstream: str, key: str) -> AsyncIterator[str]:
    """Yield the address of the relay."""
    async with aiohttp.ClientSession() as http:

        async def pass_on(request: web.Request) -> web.Response:
            headers = {"authorization": f"Bearer {key}"}
            async with http.get(upstream + request.path_qs, headers=headers) as answer:
                kept = ("content-type", "content-security-policy")
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    headers={name: answer.headers[name] for name in kept if name in answer.headers},
                )

        app = web.Application()
        app.router.add_get("/{path:.*}", pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

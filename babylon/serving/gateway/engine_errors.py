"""Errors of engines, as clients see them."""

from babylon.serving.gateway.engine_connections import EngineResponse
from babylon.serving.gateway.loader import PolicyLoader
from babylon.serving.openai_wire import RequestError


async def error_body_of(upstream: EngineResponse, name: str, loader: PolicyLoader) -> bytes:
    """Return the body of an error that the engine gave as it serves the policy ``name``.

    Raises:
        RequestError: 503, the engine has lost the policy, or refuses the gateway.
    """
    body = await upstream.read()
    match upstream.status:
        case 404:  # only loaded policies are asked, so the engine lost this one
            loader.look()
            raise RequestError(503, f"the engine lost {name}: try again", code="unavailable")
        case 401 | 403:  # the client's key is good
            raise RequestError(
                503,
                "the engine refuses the gateway: give both homes one engine.key",
                code="unavailable",
            )
    return body

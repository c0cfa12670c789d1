"""Errors of engines, as clients see them."""

import logging

from babylon.serving.gateway.engine_connections import EngineResponse
from babylon.serving.gateway.loader import PolicyLoader
from babylon.serving.openai_wire import RequestError

log = logging.getLogger(__name__)


def unanswered(error: Exception) -> RequestError:
    """Return the error of a call that no engine answered. Its addresses are for the log."""
    log.warning("a call was not answered: %s", error)
    return RequestError(503, "the engine does not answer: try again", code="unavailable")


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

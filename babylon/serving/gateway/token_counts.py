"""``POST /tokenize``: the tokens of a chat's prompt, as the engine makes them."""

import asyncio

import msgspec

from babylon.serving.gateway.asgi import Receive, Response, Scope, read_body
from babylon.serving.gateway.calls import CallHandler
from babylon.serving.gateway.engine_client import EngineDownError
from babylon.serving.gateway.engine_errors import error_body_of, unanswered
from babylon.serving.gateway.exchange import Identity
from babylon.serving.openai_wire import decode_object, for_engine, parse_chat

LIMIT_S = 60.0


async def tokenize(calls: CallHandler, scope: Scope, receive: Receive, response: Response) -> None:
    """Answer with the tokens of a chat's prompt. Nothing is recorded.

    Raises:
        RequestError: as for a call.
    """
    principal = calls.keys.admit(scope["headers"], "infer")
    calls.limits.keys.count_request(principal)
    fields = decode_object(await read_body(scope, receive))
    asked = parse_chat(fields)
    identity = Identity.of(scope["headers"], principal.agent_of(asked.user))
    agent_id = principal.attributed_agent(identity.agent_id)
    with calls.table.take(asked.model, agent_id or principal.key_id) as assigned:
        name = assigned.target.name
        body = msgspec.json.encode({**for_engine(fields), "model": name})
        async with calls.limits.for_version(name, principal.key_id, calls.engine.slots(name)):
            try:
                async with (
                    asyncio.timeout(LIMIT_S),
                    await calls.engine.call("/tokenize", body, name) as upstream,
                ):
                    if upstream.status != 200:
                        body = await error_body_of(upstream, name, calls.loader)
                    else:
                        body = await upstream.read()
                    await response.whole(body, status=upstream.status)
            except (EngineDownError, OSError) as error:
                raise unanswered(error) from error

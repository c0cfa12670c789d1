"""The embedded engine's process: ``babylon.serving.engine_protocol`` over HTTP on loopback.

``POST /v1/chat/completions`` and ``POST /v1/completions`` sample, with vLLM's wire fields.
"""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

import msgspec
from aiohttp import web
from transformers.utils.logging import disable_progress_bar

from babylon.core.errors import ModelError
from babylon.core.processes import exit_with_supervisor
from babylon.serving.engine import chat, completion
from babylon.serving.engine.answer import Answer
from babylon.serving.engine.chat import ChatAnswer
from babylon.serving.engine.completion import CompletionAnswer
from babylon.serving.engine.loaded_policies import LoadedPolicy, Policies
from babylon.serving.engine.sampling import Request
from babylon.serving.engine.scheduler import Job, Scheduler
from babylon.serving.engine_protocol import PolicySource, json_response, openai_errors
from babylon.serving.openai_wire import (
    MAX_BODY_BYTES,
    RequestError,
    SamplingRequest,
    constraints,
    decode_object,
    sse,
)

POLICIES = web.AppKey("policies", Policies)
SCHEDULER = web.AppKey("scheduler", Scheduler)
DEFAULTS: web.AppKey[dict[str, object]] = web.AppKey("defaults", dict)
_UNSUPPORTED = ("tools", "functions", "suffix")
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def make_app(defaults: Mapping[str, object] | None = None) -> web.Application:
    """Return the engine's HTTP application.

    Args:
        defaults: fields of every chat that does not set them itself.
    """
    # A gateway accepts bodies of MAX_BODY_BYTES and adds some fields.
    app = web.Application(middlewares=[openai_errors], client_max_size=MAX_BODY_BYTES + 4096)
    app[DEFAULTS] = dict(defaults or {})

    async def run_scheduler(app: web.Application) -> AsyncIterator[None]:
        app[POLICIES] = Policies()
        app[SCHEDULER] = Scheduler()
        yield
        await app[SCHEDULER].close()

    async def watch_supervisor(app: web.Application) -> AsyncIterator[None]:
        watch = asyncio.create_task(exit_with_supervisor())
        yield
        watch.cancel()

    app.cleanup_ctx.extend([run_scheduler, watch_supervisor])
    app.add_routes(
        [
            web.get("/health", _health),
            web.get("/v1/models", _models),
            web.put("/policies/{name:.+}", _load),
            web.delete("/policies/{name:.+}", _unload),
            web.post("/v1/chat/completions", _chat),
            web.post("/v1/completions", _completion),
        ]
    )
    return app


async def _health(request: web.Request) -> web.Response:
    return json_response(
        {"status": "ok", "policies": [policy.name for policy in request.app[POLICIES]]}
    )


async def _models(request: web.Request) -> web.Response:
    data = [_description(policy) for policy in request.app[POLICIES]]
    return json_response({"object": "list", "data": data})


async def _load(request: web.Request) -> web.Response:
    try:
        source = msgspec.json.decode(await request.read(), type=PolicySource)
        policy = await request.app[POLICIES].load(
            request.match_info["name"], source.path, source.version
        )
    except (msgspec.DecodeError, ModelError) as error:
        raise RequestError(400, str(error)) from error
    return json_response(_description(policy))


async def _unload(request: web.Request) -> web.Response:
    request.app[POLICIES].unload(request.match_info["name"])
    return web.Response(status=204)


async def _chat(request: web.Request) -> web.StreamResponse:
    fields = request.app[DEFAULTS] | decode_object(await request.read())
    asked = chat.parse(_checked(fields))
    policy = request.app[POLICIES].get(asked.model)
    async with _job(request, policy, chat.request_of(policy, asked), asked) as job:
        return await _send(request, ChatAnswer(policy, asked, job), asked)


async def _completion(request: web.Request) -> web.StreamResponse:
    asked = completion.parse(_checked(decode_object(await request.read())))
    policy = request.app[POLICIES].get(asked.model)
    async with _job(request, policy, completion.request_of(policy, asked), asked) as job:
        return await _send(request, CompletionAnswer(policy, asked, job), asked)


def _checked(fields: dict[str, object]) -> dict[str, object]:
    """Return the fields.

    Raises:
        RequestError: 400, this engine does not support a field.
    """
    if unsupported := constraints(fields) + [name for name in _UNSUPPORTED if fields.get(name)]:
        raise RequestError(400, f"this engine does not support {', '.join(unsupported)}: leave out")
    return fields


@contextlib.asynccontextmanager
async def _job(
    request: web.Request, policy: LoadedPolicy, sampled: Request, asked: SamplingRequest
) -> AsyncIterator[Job]:
    job = request.app[SCHEDULER].submit(
        policy, sampled, every_step=bool(asked.stream or asked.stops)
    )
    try:
        yield job
    finally:  # answered, stopped by a stop string, or the client left
        job.cancelled = True


async def _send(request: web.Request, answer: Answer, asked: SamplingRequest) -> web.StreamResponse:
    if asked.stream:
        return await _stream(request, answer)
    return web.Response(body=await answer.whole(), content_type="application/json")


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(headers=_EVENT_STREAM)
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):
        try:
            async for events in answer.events():
                await (response.write_eof(events) if answer.ended else response.write(events))
        except RequestError as error:  # the status is sent already: the error is the last event
            await response.write_eof(sse(error.body))
    return response


def _description(policy: LoadedPolicy) -> dict[str, object]:
    return {
        "id": policy.name,
        "object": "model",
        "created": 0,
        "owned_by": "babylon",
        "root": policy.path,
        "version": policy.version,
        "max_model_len": policy.context,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="babylon.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    web.run_app(
        make_app(),
        host="127.0.0.1",
        port=options.port,
        handler_cancellation=True,
        shutdown_timeout=10,
        access_log=None,
        print=None,
    )


if __name__ == "__main__":
    main()

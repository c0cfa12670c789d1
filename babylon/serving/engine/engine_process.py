"""The embedded engine's process: ``babylon.serving.engine_protocol`` over HTTP on loopback.

``POST /v1/chat/completions`` and ``POST /v1/completions`` sample, with vLLM's wire fields;
``POST /tokenize`` gives the tokens of a chat's prompt.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from babylon.core.api_keys import engine_secret
from babylon.core.errors import ArtifactError, ModelError, StorageError
from babylon.core.home import Home
from babylon.core.memory import keep_memory_small
from babylon.core.processes import in_background
from babylon.policies.shared_files import fetch_checkpoint
from babylon.serving.engine.answer import Answer
from babylon.serving.engine.answer_grammar import answer_grammar
from babylon.serving.engine.choice import ChatChoice, Choice, CompletionChoice
from babylon.serving.engine.loaded_policies import LoadedPolicy, Policies
from babylon.serving.engine.sampler_requests import (
    chat_requests,
    completion_requests,
    prompt_of,
)
from babylon.serving.engine.sampling import Request
from babylon.serving.engine.scheduler import MAX_BATCH, Job, Scheduler
from babylon.serving.engine_protocol import PolicySource, engine_app, json_response, run_engine
from babylon.serving.openai_wire import (
    MAX_BODY_BYTES,
    ChatRequest,
    CompletionRequest,
    RequestError,
    constraints,
    decode_object,
    parse_chat,
    parse_completion,
    sse,
)

Asked = TypeVar("Asked", ChatRequest, CompletionRequest)
POLICIES = web.AppKey("policies", Policies)
HOME: web.AppKey[Home | None] = web.AppKey("home", Home)
SCHEDULER = web.AppKey("scheduler", Scheduler)
DEFAULTS: web.AppKey[dict[str, object]] = web.AppKey("defaults", dict)
# Fields that this engine does not have, with the values with which they change nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "suffix": ("",),
    "documents": ([],),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_assistant_tokens_mask": (False,),
}
_NOT_OF_CHATS = _UNSUPPORTED | {"add_special_tokens": (False,)}  # the template writes them
_NOT_OF_COMPLETIONS = _UNSUPPORTED | {
    "tools": ([],),
    "chat_template_kwargs": ({},),
    "add_special_tokens": (True,),
}
_GRAMMARS = {"tool_choice", "response_format"}  # what chats may constrain
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def make_app(
    defaults: Mapping[str, object] | None = None, home: Home | None = None
) -> web.Application:
    """Return the engine's HTTP application.

    Args:
        defaults: fields of every chat that does not set them itself.
        home: resolves references to checkpoints, whose files may come from its object store.
    """

    async def run_scheduler(app: web.Application) -> AsyncIterator[None]:
        app[POLICIES] = Policies()
        app[SCHEDULER] = Scheduler()
        yield
        await app[SCHEDULER].close()

    # A gateway accepts bodies of MAX_BODY_BYTES and adds some fields.
    app = engine_app(
        run_scheduler, _health, _models, _load, _unload, max_body_bytes=MAX_BODY_BYTES + 4096
    )
    app[DEFAULTS] = dict(defaults or {})
    app[HOME] = home
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _completion)
    app.router.add_post("/tokenize", _tokenize)
    return app


async def _health(request: web.Request) -> web.Response:
    return json_response(
        {"status": "ok", "policies": [policy.name for policy in request.app[POLICIES]]}
    )


async def _models(request: web.Request) -> web.Response:
    data = [_description(policy) for policy in request.app[POLICIES]]
    return json_response({"object": "list", "data": data})


async def _model(request: web.Request) -> web.Response:
    return json_response(_description(request.app[POLICIES].get(request.match_info["name"])))


async def _load(request: web.Request) -> web.Response:
    try:
        source = msgspec.json.decode(await request.read(), type=PolicySource)
        path = source.path
        if home := request.app[HOME]:
            path = await asyncio.to_thread(fetch_checkpoint, home, home.resolve(path))
        policy = await request.app[POLICIES].load(request.match_info["name"], path, source.version)
    except (msgspec.DecodeError, ModelError, ArtifactError, StorageError) as error:
        raise RequestError(400, str(error)) from error
    return json_response(_description(policy))


async def _unload(request: web.Request) -> web.Response:
    request.app[POLICIES].unload(request.match_info["name"])
    return web.Response(status=204)


async def _chat(request: web.Request) -> web.StreamResponse:
    fields = request.app[DEFAULTS] | decode_object(await request.read())
    asked = parse_chat(_checked(fields, _NOT_OF_CHATS, _GRAMMARS))
    policy = request.app[POLICIES].get(asked.model)
    grammar = answer_grammar(asked)
    # in threads: other answers must not wait for the compiler or for a long prompt
    constraint = await asyncio.to_thread(policy.constraint, grammar) if grammar else None
    sampled = await asyncio.to_thread(chat_requests, policy, asked, constraint)
    return await _sample(request, policy, asked, sampled, ChatChoice)


async def _tokenize(request: web.Request) -> web.Response:
    fields = request.app[DEFAULTS] | decode_object(await request.read())
    asked = parse_chat(_checked(fields, _NOT_OF_CHATS, fields))  # nothing is sampled
    policy = request.app[POLICIES].get(asked.model)
    tokens = await asyncio.to_thread(prompt_of, policy, asked)
    return json_response({"count": len(tokens), "max_model_len": policy.context, "tokens": tokens})


async def _completion(request: web.Request) -> web.StreamResponse:
    asked = parse_completion(_checked(decode_object(await request.read()), _NOT_OF_COMPLETIONS))
    policy = request.app[POLICIES].get(asked.model)
    sampled = await asyncio.to_thread(completion_requests, policy, asked)
    return await _sample(request, policy, asked, sampled, CompletionChoice)


def _checked(
    fields: dict[str, object],
    refused: Mapping[str, tuple[object, ...]],
    allowed: Collection[str] = (),
) -> dict[str, object]:
    unsupported = [name for name in constraints(fields) if name not in allowed]
    unsupported += [n for n, same in refused.items() if fields.get(n) not in (None, *same)]
    if unsupported:
        raise RequestError(400, f"this engine does not support {', '.join(unsupported)}: leave out")
    return fields


async def _sample(
    request: web.Request,
    policy: LoadedPolicy,
    asked: Asked,
    sampled: Sequence[Request],
    kind: Callable[[LoadedPolicy, Asked, Job, int], Choice],
) -> web.StreamResponse:
    every_step = bool(asked.stream or asked.stops)
    jobs = request.app[SCHEDULER].submit(policy, sampled, every_step=every_step)
    try:
        choices = [kind(policy, asked, job, index) for index, job in enumerate(jobs)]
        answer = Answer(policy, asked, choices)
        if asked.stream:
            return await _stream(request, answer)
        return web.Response(body=await answer.whole(), content_type="application/json")
    finally:  # answered, stopped by a stop string, or the client left
        for job in jobs:
            job.cancelled = True


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
        "slots": MAX_BATCH,
    }


async def _keep_memory_small(_: web.Application) -> AsyncIterator[None]:
    gc.freeze()  # objects from the start live as long as the process: skip them in collections
    async with in_background(keep_memory_small()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(prog="babylon.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--home", type=Path, help="only the home's secret loads and unloads")
    parser.add_argument("--store", default="", help="URI of the object store with checkpoints")
    parser.add_argument("--cache-gb", type=float, default=100.0, help="bound of their copies")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    secret = engine_secret(options.home) if options.home else None
    home = Home(options.home.absolute(), options.store, options.cache_gb) if options.home else None
    app = make_app(home=home)
    app.cleanup_ctx.append(_keep_memory_small)
    run_engine(app, options.port, secret, shutdown_timeout_s=10, host=options.host)


if __name__ == "__main__":
    main()

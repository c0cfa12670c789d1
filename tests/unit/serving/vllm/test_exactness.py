"""Features that a running vLLM server lacks, found out over HTTP."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.settings import ServingSettings
from babylon.ops.doctor import check_vllm

CHANCES = (0.5, 0.3, 0.15, 0.05)


@asynccontextmanager
async def server(
    *, raw: bool = False, default_top_k: int = 0, tools: bool = True, silent: bool = False
) -> AsyncIterator[str]:
    """A server whose policy knows four tokens."""

    async def chat(request: web.Request) -> web.Response:
        asked = await request.json()
        if "tools" in asked and not tools:
            message = '"auto" tool choice requires --enable-auto-tool-choice'
            return web.json_response({"error": {"message": message}}, status=400)
        heat = 1.0 if raw else asked.get("temperature", 1.0)
        kept = [chance ** (1 / heat) for chance in CHANCES]
        if not raw and (top_k := asked.get("top_k", default_top_k)):
            kept = kept[:top_k]
        top = [{"token": "a", "logprob": math.log(kept[0] / sum(kept))}]
        content = [{**top[0], "top_logprobs": top}]
        told = None if silent else {"content": content}
        return web.json_response({"choices": [{"logprobs": told}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base", "root": "/base"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


@pytest.mark.parametrize(
    ("raw", "default_top_k", "tools", "missing"),
    [
        (False, 0, True, []),
        (True, 0, True, ["processed_logprobs"]),
        (False, 2, True, ["--generation-config vllm"]),
        (False, 0, False, ["--enable-auto-tool-choice"]),
        (True, 2, False, ["processed_logprobs", "--tool-call-parser"]),
    ],
)
async def test_the_doctor_names_what_a_foreign_vllm_lacks(
    raw: bool, default_top_k: int, tools: bool, missing: list[str]
) -> None:
    async with server(raw=raw, default_top_k=default_top_k, tools=tools) as url:
        (finding,) = await check_vllm(ServingSettings(engine="vllm", engine_url=url))
    assert finding.ok is not bool(missing)
    assert all(flag in finding.detail for flag in missing)
    assert ("serves base" in finding.detail) is not bool(missing)


async def test_a_server_without_logprobs_is_a_finding() -> None:
    async with server(silent=True) as url:
        (finding,) = await check_vllm(ServingSettings(engine="vllm", engine_url=url))
    assert finding.ok is False and "answers without logprobs" in finding.detail

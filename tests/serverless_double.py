"""A double of W&B's training API, on loopback: the endpoints that ART's client calls.

As in the real one a model's newest checkpoint is trained, there is no list of jobs, lists come in
pages, and every request needs the API key. A job ends when its events are first asked for.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from peft import LoraConfig, get_peft_model

from tests.tiny_policy import tiny_model

KEY = "a-key-of-the-double"
PAGE = 3  # small, so that paging is needed
Ending = Literal["ends", "fails", "hangs"]


@dataclass
class Job:
    id: str
    model: str
    body: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class ServerlessDouble:
    """``ending`` is how jobs go; ``gates`` hold answers back: name of a request → what it awaits
    after it was carried out and before it is answered."""

    ending: Ending = "ends"
    refusal: int | None = None  # status that submissions are answered with instead
    events_status: int | None = None  # the same for looks at a job's events
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoints: dict[str, list[int]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    gates: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    url: str = ""

    async def _models(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["name"]
        model = self.models.setdefault(
            name,
            {
                **{key: body[key] for key in ("project", "name", "base_model")},
                "id": f"id-of-{name}",
                "entity": body["entity"] or "team",
                "run_id": None,
            },
        )
        self.checkpoints.setdefault(model["id"], [0])
        return web.json_response(model)

    async def _list(self, request: web.Request) -> web.Response:
        steps = self.checkpoints[request.match_info["model"]]
        rows = [{"id": f"c{s}", "step": s, "metrics": {"loss": 0.5}} for s in steps]
        return _page(rows[::-1] if request.query.get("order") == "desc" else rows, request)

    async def _delete(self, request: web.Request) -> web.Response:
        steps = (await request.json())["steps"]
        model = request.match_info["model"]
        self.checkpoints[model] = [s for s in self.checkpoints[model] if s not in steps]
        self.deleted += steps
        return web.json_response({"deleted_count": len(steps), "not_found_steps": []})

    async def _submit(self, request: web.Request) -> web.Response:
        if self.refusal:
            return web.json_response({"error": {"message": "no credit"}}, status=self.refusal)
        body = await request.json()
        job = Job(f"job-{len(self.jobs) + 1}", body["model_id"], body)
        self.jobs.append(job)
        await self._pass("submit")
        return web.json_response({"id": job.id})

    async def _events(self, request: web.Request) -> web.Response:
        job = next(job for job in self.jobs if job.id == request.match_info["job"])
        await self._pass("events")
        if self.events_status:
            body = {"error": {"message": "no events today"}}
            return web.json_response(body, status=self.events_status)
        self.run(job)
        return _page(job.events, request)

    def run(self, job: Job) -> None:
        """Work that the service does in its own time."""
        if job.events or self.ending == "hangs":
            return
        numbers = itertools.count()

        def event(kind: str, **data: Any) -> dict[str, Any]:
            return {"id": f"{job.id}-{next(numbers)}", "type": kind, "data": data}

        job.events = [event("training_started", num_sequences=2)]
        if self.ending == "fails":
            job.events += [event("training_failed", error_message="the GPUs are on fire")]
            return
        job.events += [event("gradient_step", loss=loss, grad_norm=2.0) for loss in (0.75, 0.25)]
        job.events += [event("training_ended")]
        self.checkpoints[job.model].append(max(self.checkpoints[job.model]) + 1)

    async def _pass(self, gate: str) -> None:
        if gate in self.gates:
            await self.gates[gate]()


@web.middleware
async def _needs_the_key(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        return web.json_response({"error": {"message": "unknown key"}}, status=401)
    return await handler(request)


def _page(rows: list[dict[str, Any]], request: web.Request) -> web.Response:
    after = request.query.get("after")
    start = next((i + 1 for i, row in enumerate(rows) if row["id"] == after), 0)
    end = start + min(int(request.query.get("limit", PAGE)), PAGE)
    return web.json_response({"data": rows[start:end], "has_more": end < len(rows)})


@asynccontextmanager
async def serverless_double() -> AsyncIterator[ServerlessDouble]:
    """The double runs while the block runs; ``url`` is the base URL for ART's client."""
    double = ServerlessDouble()
    app = web.Application(middlewares=[_needs_the_key], client_max_size=2**26)
    root = "/v1/preview"
    app.add_routes(
        [
            web.post(f"{root}/models", double._models),
            web.get(f"{root}/models/{{model}}/checkpoints", double._list),
            web.delete(f"{root}/models/{{model}}/checkpoints", double._delete),
            web.post(f"{root}/training-jobs", double._submit),
            web.get(f"{root}/training-jobs/{{job}}/events", double._events),
        ]
    )
    async with TestServer(app) as server:
        double.url = str(server.make_url("/v1"))
        yield double


class ArtifactStore:
    """In place of W&B's: each step of a model is a random adapter, which names no base model."""

    def __init__(self, *, api_key: str) -> None:
        assert api_key == KEY

    def artifact(self, name: str, *, type: str) -> Any:
        model, step = name.split(":step")
        assert (model, type) == ("team/babylon/babylon", "lora")
        return SimpleNamespace(download=partial(self._download, int(step)))

    @staticmethod
    def _download(step: int, *, root: str, skip_cache: bool) -> None:
        torch.manual_seed(step)
        lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        get_peft_model(tiny_model(1), lora).save_pretrained(root)


class Gate:
    """A request arrives here and is never answered: its client dies."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()

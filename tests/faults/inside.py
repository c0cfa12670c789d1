"""Inside a worker: ``python -m babylon.flows`` as it is, with two things taken away that cost
seconds.

Prefect's engine: flows and tasks are called as the functions that they wrap, so the composition in
``flows/`` is the one that runs, without a server, retries and pages. And the arena: the challenger
passes unseen.
"""

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openai.resources  # noqa: F401  what a run imports on its way, imported once for all
from prefect import Flow, Task
from prefect.states import Completed

import babylon.flows.__main__ as entry
from babylon.cli.requests import TrainRequest, encode
from babylon.core.settings import Settings
from babylon.core.types import Trained, Verdict
from babylon.stages import validate_checkpoint as gate
from babylon.store import Store, connection
from babylon.store.policies import Policy


def train(window_id: str, idle_s: str = "60") -> int:
    """``babylon train --window ID --json``; returns its exit code.

    ``idle_s``: after so long the server ends a transaction whose owner has halted.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("babylon.flows", "babylon.tasks")):
            _take_prefect_out(module)
    gate._met = _passed_unseen  # type: ignore[assignment]
    connection.HALTED_S = float(idle_s)
    return entry.main(["flows", encode(TrainRequest(window_id=window_id, json=True))])


def _take_prefect_out(module: Any) -> None:
    for name, value in list(vars(module).items()):
        if isinstance(value, Flow | Task):
            setattr(module, name, _plain(value))
        elif getattr(value, "__module__", None) == "prefect.artifacts":
            setattr(module, name, _leave_no_page)


def _plain(wrapped: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def run(*args: Any, return_state: bool = False, **options: Any) -> Any:
        result = await wrapped.fn(*args, **options)
        return Completed(data=result) if return_state else result

    return run


async def _leave_no_page(*_: Any, **__: Any) -> None:
    return None


async def _passed_unseen(
    store: Store,
    settings: Settings,
    trained: Trained,
    serving: Policy,
    route_version: int,
    *_: object,
) -> Verdict:
    assert Path(trained.checkpoint_uri).is_dir(), f"no checkpoint at {trained.checkpoint_uri}"
    return Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=True,
        reason="passed unseen",
    )

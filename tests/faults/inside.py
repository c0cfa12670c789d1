"""Inside a worker: ``babylon train`` without the two parts that take seconds.

Prefect's engine: flows and tasks are called as the functions that they wrap, so the composition in
``flows/`` is the one that runs, without a server, retries and pages. And the arena: the challenger
passes unseen.
"""

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from babylon.cli import main
from babylon.cli.flow_runs import prepare_prefect
from babylon.core.settings_loading import load_settings
from babylon.core.types import Trained, Verdict
from babylon.stages import validate_checkpoint as gate
from babylon.store import Store, connection
from babylon.store.policies import Policy

prepare_prefect(load_settings().home, load_settings().prefect)

import openai.resources  # noqa: E402, F401  the imports of a run, made once for all workers
from prefect import Flow, State, Task  # noqa: E402

import babylon.flows.backfill  # noqa: E402
import babylon.flows.continuous  # noqa: E402
import babylon.scoring.judge.judge_scorers  # noqa: E402
import babylon.training.update  # noqa: E402, F401  the stages import it, and torch, when they run


def train(window_id: str, idle_s: str = "60") -> int:
    """``babylon train --window ID --json``; returns its exit code.

    ``idle_s``: after so long the server ends a transaction whose owner has halted.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("babylon.flows", "babylon.tasks")):
            _take_prefect_out(module)
    gate._met = _passed_unseen  # type: ignore[assignment]
    connection.HALTED_S = float(idle_s)
    try:
        main(["train", "--window", window_id, "--json"])
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("the command line leaves by SystemExit")


def _take_prefect_out(module: Any) -> None:
    for name, value in list(vars(module).items()):
        if isinstance(value, Flow | Task):
            setattr(module, name, _plain(value))
        elif getattr(value, "__module__", None) == "prefect.artifacts":
            setattr(module, name, _leave_no_page)


def _plain(wrapped: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def run(*args: Any, **options: Any) -> Any:
        result = await wrapped.fn(*args, **options)
        return result.data if isinstance(result, State) else result  # a flow may name its end

    run.name = wrapped.name  # type: ignore[attr-defined]
    return run


async def _leave_no_page(*_: Any, **__: Any) -> None:
    return None


async def _passed_unseen(
    store: Store,
    trained: Trained,
    serving: Policy,
    route_version: int,
    *_: object,
    **__: object,
) -> Verdict:
    directory = Path(store.home.resolve(trained.checkpoint_uri))
    assert directory.is_dir(), f"no checkpoint at {directory}"
    return Verdict(
        claim=trained.claim,
        policy_version=trained.policy_version,
        route_version=route_version,
        promote=True,
        reason="passed unseen",
    )

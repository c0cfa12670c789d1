"""A worker process: takes windows through the eight stages until all are done.

The composition is that of the flows. Claims, leases, the line, commits, routes and fates are the
real ones, and so are the stages ``train``, ``validate checkpoint`` and ``deploy``. Collection and
scoring read only ids. In place of gradient steps, the update writes a policy that says one letter.
The gate serves it beside the champion and lets both play a task (``tests.faults.letters``).
"""

import asyncio
import random
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import polars as pl

from babylon.core.artifacts import write_artifact
from babylon.core.errors import BabylonError
from babylon.core.game_rows import UNTRAINED
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import TRAJECTORY_SCHEMA, trajectory_row
from babylon.core.types import Claim, Collected, Scored, Trained, Verdict
from babylon.core.windows import DONE, Window, WindowState
from babylon.flows import eight_stages as stages
from babylon.flows import train_window as flow
from babylon.stages import siblings
from babylon.stages import train as training
from babylon.stages import validate_checkpoint as gate
from babylon.stages.claim import commit_collected, commit_scored
from babylon.stages.deploy import deploy_checkpoint
from babylon.stages.fingerprint import scoring_fingerprint
from babylon.stages.pending import window_to_train
from babylon.store import Store, open_store
from babylon.store.connection import UNREACHABLE
from babylon.store.windows import list_windows, set_state
from tests.faults.letters import learnt_letter
from tests.speaking_policy import save_speaking_policy
from tests.trajectories import a_trajectory

STEP_S = 0.02  # the longest pause in a stage
_SCORED = {**TRAJECTORY_SCHEMA, "score": pl.Float64}


@dataclass(frozen=True)
class Here:
    """The GPU stages, in this process."""

    settings: Settings
    store: Store

    async def train(self, scored: Scored) -> Trained:
        return await training.train_window(self.store, self.settings, scored)

    async def validate_checkpoint(self, trained: Trained) -> Verdict:
        return await gate.validate_checkpoint(self.store, self.settings, trained)


def work(order: str, seed: str) -> int:
    """Work until all windows are done; ``order``: oldest, newest or any window first."""
    random.seed(int(seed))
    asyncio.run(_work(load_settings(), order))
    return 0


async def _work(settings: Settings, order: str) -> None:
    siblings.updater = lambda _: _update
    siblings.update_metrics = lambda update, scored: {}
    while True:
        try:
            async with open_store(settings) as store:
                _take_the_place_of_tasks(store)
                while left := await _left(store):
                    await _look(store, settings, order, left)
                    await _pause()
                return
        except UNREACHABLE:  # Postgres was killed
            await asyncio.sleep(0.2)


async def _left(store: Store) -> list[str]:
    done = {row.window_id for row in await list_windows(store) if row.state in DONE}
    ids = await store.pool.fetch('SELECT DISTINCT "windowId" FROM trajectories ORDER BY 1')
    return [row[0] for row in ids if row[0] not in done]


async def _look(store: Store, settings: Settings, order: str, left: list[str]) -> None:
    """One look of a deployment: the windows that it saw, or one window."""
    if order == "any":
        left = random.sample(left, 1)
    elif order == "newest":
        left.reverse()
    gpu: Any = Here(settings, store)
    for window_id in left:
        window = await window_to_train(store, settings.windows, settings.quality, window_id)
        finish = partial(flow._finish, store, gpu)
        try:
            await stages.eight_stages(store, gpu, window, finish)
        except UNREACHABLE:
            raise
        except BabylonError as error:  # somebody else's, superseded, or done meanwhile
            print(window_id, type(error).__name__, error, flush=True)


def _take_the_place_of_tasks(store: Store) -> None:
    async def collect(settings: Settings, claim: Claim, window: Window) -> Collected:
        await _pause()
        rows = await store.pool.fetch(
            f'SELECT "trajectoryId" FROM trajectories t WHERE "windowId" = $1 AND {UNTRAINED}'
            " ORDER BY 1",
            window.id,
        )
        frame = pl.DataFrame([_row(row[0], window) for row in rows], schema=_SCORED)
        artifact = write_artifact(settings.home, frame, window_id=window.id)
        collected = Collected(claim=claim, artifact=artifact)
        await commit_collected(store, collected)
        return collected

    async def validate(settings: Settings, collected: Collected) -> Collected:
        await _pause()
        await set_state(store, collected.claim, WindowState.VALIDATED)
        return collected

    async def dropout(settings: Settings, collected: Collected) -> Collected:
        return collected

    async def score(settings: Settings, collected: Collected) -> Scored:
        await _pause()
        rows = collected.artifact.rows
        scored = Scored(
            claim=collected.claim,
            artifact=collected.artifact,
            eligible=rows,
            agents=rows,
            scorer="none",
            avg_reward=0.0,
            fingerprint=scoring_fingerprint(settings),
        )
        await commit_scored(store, scored)
        return scored

    async def deploy(settings: Settings, verdict: Verdict) -> Any:
        await _pause()
        return await deploy_checkpoint(store, settings, verdict)

    async def nothing(*_: object) -> None: ...

    here = locals()
    for name in ("collect", "validate", "dropout", "score", "deploy"):
        setattr(stages, name, here[name])
    for name in ("publish", "run_after"):
        setattr(stages, name, nothing)


def _row(trajectory_id: str, window: Window) -> dict[str, object]:
    trajectory = a_trajectory(
        trajectory_id,
        agent_id="player",
        window_id=window.id,
        scenario_id=window.id,
        start=window.start,
        end=window.end,
        steps=0,
    )
    return {**trajectory_row(trajectory, game_json="[]", knowledge_json="{}"), "score": 0.0}


async def _update(work: Any) -> Any:
    await _pause()
    work.target.mkdir(parents=True, exist_ok=True)
    save_speaking_policy(work.target, learnt_letter(work.claim.window_id))
    await _pause()
    return SimpleNamespace(trajectory_ids=[row.trajectory_id for row in work.rows])


async def _pause() -> None:
    await asyncio.sleep(random.uniform(0, STEP_S))


if __name__ == "__main__":
    sys.exit(work(*sys.argv[1:]))

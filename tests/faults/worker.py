"""A worker process: claims window after window until all are done, and says each step it takes.

Claims, leases, stages and commits are the real ones; only what computes is left out.
"""

import asyncio
import sys
from random import Random

import polars as pl

from babylon.core.artifacts import write_artifact
from babylon.core.errors import WindowError
from babylon.core.game_rows import UNTRAINED
from babylon.core.settings import Settings, load_settings
from babylon.core.types import Claim, Collected, Scored
from babylon.core.windows import DONE, Window, WindowState, parse_window_id
from babylon.stages.claim import claimed, commit_collected, commit_scored, resume
from babylon.stages.fingerprint import scoring_fingerprint
from babylon.stages.train import batch_of
from babylon.store import Store, open_store
from babylon.store.policies import commit_policy
from babylon.store.windows import list_windows, set_state

STEP_S = 0.01


async def work(settings: Settings, windows: list[Window], seed: int) -> None:
    async with open_store(settings) as store:
        while left := await _left(store, windows):
            Random(seed).shuffle(left)
            for window in left:
                try:
                    async with claimed(store, settings.windows, window) as claim:
                        await _train(store, settings, claim, window)
                except WindowError:  # somebody else's, or done meanwhile
                    continue
            await asyncio.sleep(0.05)


async def _left(store: Store, windows: list[Window]) -> list[Window]:
    done = {row.window_id for row in await list_windows(store) if row.state in DONE}
    return [window for window in windows if window.id not in done]


async def _train(store: Store, settings: Settings, claim: Claim, window: Window) -> None:
    scored, trained = await resume(store, settings, claim)
    if scored is None:
        scored = await _score(store, settings, claim, window)
    if trained is None:
        ids = pl.read_parquet(scored.artifact.uri.removeprefix("file://"))["trajectory_id"]
        await _say(window, "train")
        await commit_policy(
            store,
            claim,
            parent_version=0,
            kind="lora",
            uri=f"file:///{claim.window_id}-e{claim.epoch}",
            base_model="tiny",
            batch_id=batch_of(claim.window_id),
            trajectory_ids=ids.to_list(),
            metrics={},
        )
    await _say(window, "validate checkpoint")
    await set_state(store, claim, WindowState.DEPLOYED)
    await _say(window, "done")


async def _score(store: Store, settings: Settings, claim: Claim, window: Window) -> Scored:
    await _say(window, "collect")
    rows = await store.pool.fetch(
        f'SELECT "trajectoryId" AS trajectory_id FROM trajectories t WHERE "windowId" = $1'
        f" AND {UNTRAINED} ORDER BY 1",
        window.id,
    )
    frame = pl.DataFrame([dict(row) for row in rows])
    artifact = write_artifact(frame, settings.home.artifacts, window_id=window.id)
    await commit_collected(store, Collected(claim=claim, artifact=artifact))
    await _say(window, "validate")
    await set_state(store, claim, WindowState.VALIDATED)
    await _say(window, "score")
    scored = Scored(
        claim=claim,
        artifact=artifact,
        eligible=artifact.rows,
        agents=artifact.rows,
        scorer="none",
        avg_reward=0.0,
        fingerprint=scoring_fingerprint(settings),
    )
    await commit_scored(store, scored)
    return scored


async def _say(window: Window, step: str) -> None:
    print(f"{window.id} {step}", flush=True)
    await asyncio.sleep(STEP_S)


if __name__ == "__main__":
    seed, lease_s, *ids = sys.argv[1:]
    asyncio.run(
        work(
            load_settings(windows={"lease_s": float(lease_s)}),
            [parse_window_id(window_id) for window_id in ids],
            int(seed),
        )
    )

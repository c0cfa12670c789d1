"""A worker that is killed between the siblings of a window, and the next one, which goes on."""

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babylon.core.failpoints import VARIABLE
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.types import Scored
from babylon.core.windows import parse_window_id
from babylon.stages.train import train_window
from babylon.store import Store, open_store
from babylon.store.policies import ensure_base, get_policy
from babylon.store.population import list_siblings
from babylon.store.windows import claim_window
from tests.deciding_policy import save_deciding_policy
from tests.integration.test_train_stage import rows, scored

ROOT = Path(__file__).parents[2]
THREE: dict[str, Any] = {
    "training": {"iterations": 1, "batch_size": 2, "accumulation": 1, "lora_rank": 2},
    "population": {"size": 3, "worlds": 16},
    "evaluation": {"rules": "starter", "scenarios": 64},
}


async def work(url: str, home: str, manifest: str) -> None:
    settings = load_settings(database={"url": url}, home=Path(home), **THREE)
    async with open_store(settings) as store:
        await train_window(store, settings, msgspec.json.decode(manifest, type=Scored))


def worker(settings: Settings, window: Scored, failpoint: str = "") -> int:
    """Run a worker in a process of its own; return how it ended."""
    url = settings.database.url
    assert url is not None
    manifest = msgspec.json.encode(window).decode()
    command = [
        sys.executable,
        "-m",
        __name__,
        url.get_secret_value(),
        str(settings.home.root),
        manifest,
    ]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), VARIABLE: failpoint}
    return subprocess.run(command, cwd=ROOT, env=env, timeout=600, check=False).returncode


@pytest.mark.slow
async def test_a_killed_worker_leaves_its_finished_siblings_to_the_next(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    base = save_deciding_policy(tmp_path / "base")
    await ensure_base(store, uri=str(base), base_model="deciding")
    window = await scored(store, settings, 9, rows(base, version=0))
    ended = await asyncio.to_thread(worker, settings, window, "checkpoint.written@2")
    assert ended == -signal.SIGKILL
    (first,) = await list_siblings(store)
    weights = Path(first.uri) / "adapter_model.safetensors"
    written = weights.stat().st_mtime_ns

    again = await claim_window(store, parse_window_id("2025-11-14T09:00"), owner="b", lease_s=0)
    ended = await asyncio.to_thread(
        worker, settings, replace(window, claim=again), "policy.before"
    )  # killed once more, when all have played
    assert ended == -signal.SIGKILL
    found = await list_siblings(store)
    assert [one.member for one in found] == [0, 1, 2]
    assert replace(found[0], fitness=None, fitness_error=None, worlds=0, chosen=False) == first
    assert all(one.worlds == 16 for one in found) and sum(one.chosen for one in found) == 1
    assert found[0].chosen is False or weights.stat().st_mtime_ns == written

    last = await claim_window(store, parse_window_id("2025-11-14T09:00"), owner="c", lease_s=0)
    assert await asyncio.to_thread(worker, settings, replace(window, claim=last)) == 0
    (chosen,) = [one for one in await list_siblings(store) if one.chosen]
    assert [one.fitness for one in await list_siblings(store)] == [one.fitness for one in found]
    assert (await get_policy(store, 1)).uri == chosen.uri
    assert not [one for one in found if one.member != chosen.member and Path(one.uri).exists()]


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))

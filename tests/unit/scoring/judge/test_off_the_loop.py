"""Prompts, fits and scores are computed in threads, so that the lease is renewed meanwhile."""

import asyncio
import threading

import pytest

from babylon.scoring.judge import judge_window as module
from babylon.scoring.judge.judge_client import JudgeClient
from babylon.scoring.judge.judgment import GroundTruth
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.judged import SCALE, config, ladder


@pytest.mark.parametrize("work", ["prepare_readable", "calibrate", "believe"])
async def test_a_heartbeat_goes_on_during_the_work(work, monkeypatch):
    """The work waits for the heartbeat. On the loop it would wait in vain."""
    beat, waited = threading.Event(), []
    real = getattr(module, work)

    def waits_for_the_heartbeat(*arguments, **options):
        beat.clear()
        waited.append(beat.wait(timeout=20))
        return real(*arguments, **options)

    async def heartbeat():
        while True:
            beat.set()
            await asyncio.sleep(0.001)

    monkeypatch.setattr(module, work, waits_for_the_heartbeat)
    heart = asyncio.create_task(heartbeat())
    async with (
        LoopbackJudge(Mind(scale=SCALE, noise=0.3)) as judge,
        JudgeClient(model="m", base_url=judge.base_url) as client,
    ):
        await module.judge_window(
            client, ladder(8)[0], GroundTruth(), config(), ledger=MemoryJudgments()
        )
    heart.cancel()
    assert waited and all(waited)

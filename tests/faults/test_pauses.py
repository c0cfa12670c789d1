"""A worker that is halted for longer than its lease (SIGSTOP, a suspended laptop, a long pause of a
virtual machine) finds its window taken over, writes nothing more and says so."""

import signal
from pathlib import Path

import pytest

from tests.faults.cli import babylon_train, ended, stopped
from tests.faults.world import World, whole_only

PLACES = (
    "artifact.written@2",
    "scores.before",
    "checkpoint.written",
    "policy.before",
    "verdict.before",
    "route.before",
    "state.before@3",
)


@pytest.mark.parametrize("place_of_pause", PLACES)
async def test_a_sleeping_worker_is_fenced(
    place_of_pause: str, world: World, tmp_path: Path
) -> None:
    async with world.place(tmp_path / "home") as place:
        with place.worker(f"{place_of_pause}=stop") as sleeper:
            await sleeper.stopped()
            await place.lease_over()
            code, said = await place.run()
            assert code == 0, said
            finished = await place.outcome()
            sleeper.go_on()
            assert await sleeper.ended() == 1, sleeper.said
            # On a busy machine its renewal fails before it can ask who has the window now.
            fenced = ("took it over", "was taken over", "it counts as lost")
            assert any(words in sleeper.said for words in fenced), sleeper.said
        await place.later_runs()
        assert {**await place.outcome(), "files": None} == {**finished, "files": None}
    assert [row["state"] for row in finished["window"]] == ["deployed"]


@whole_only
async def test_a_babylon_train_that_slept_is_fenced(world: World, tmp_path: Path) -> None:
    async with world.place(tmp_path / "home") as place:
        await place.rule_out()
        async with babylon_train(place.settings, "policy.before=stop") as sleeper:
            await stopped(sleeper)
            await place.lease_over()
            code, said = await place.run()
            assert code == 0, said
            finished = await place.outcome()
            sleeper.send_signal(signal.SIGCONT)
            code, said = await ended(sleeper)
        assert code == 1 and '"kind":"FencedError"' in said, said
        assert {**await place.outcome(), "files": None} == {**finished, "files": None}


async def test_a_worker_stopped_in_a_write_blocks_no_other(world: World, tmp_path: Path) -> None:
    async with world.place(tmp_path / "home") as place:
        with place.worker("policy.inserted=stop", "1") as sleeper:
            await sleeper.stopped()
            code, said = await place.run()
            while "is leased by" in said:
                code, said = await place.run()
            assert code == 0, said
            finished = await place.outcome()
            sleeper.go_on()
            assert await sleeper.ended() == 1, sleeper.said
        assert {**await place.outcome(), "files": None} == {**finished, "files": None}

"""A change of the route by hand, killed at any of its side effects: either nothing was changed or
all of it, gateways follow what is in force, and the same command again ends it."""

import signal
from pathlib import Path

import pytest

from babylon.store.proposals import open_proposals
from babylon.store.routes import current_route
from tests.deployments import announced, three_policies
from tests.faults.processes import Worker
from tests.faults.world import WHOLE, World

BEFORE = ("proposal.opened", "route.before", "route.inserted")
AFTER = ("route.after", "proposal.closed", "route.acknowledged")
CASES = [(mode, place) for mode in ("replace", "ab") for place in (*BEFORE, *AFTER)]
QUICK = {("replace", "proposal.opened"), ("ab", "route.after")}


@pytest.mark.parametrize(("mode", "place"), [case for case in CASES if WHOLE or case in QUICK])
async def test_a_killed_deployment_changed_nothing_or_everything_and_may_be_asked_for_again(
    mode: str, place: str, world: World, tmp_path: Path
) -> None:
    async with world.place(tmp_path / "home") as found:
        store, settings = found.store, found.settings
        await store.pool.execute("TRUNCATE babylon.policies CASCADE")
        await three_policies(store)
        async with announced(store):
            with Worker(settings, "tests.faults.acts:deploy", mode, failpoint=place) as worker:
                assert await worker.ended() == -signal.SIGKILL, worker.said
            route = await current_route(store)
            assert (2 in route.versions) == (place in AFTER)
            assert len(await open_proposals(store)) == (place not in AFTER[1:])
            with Worker(settings, "tests.faults.acts:deploy", mode) as worker:
                code, said = await worker.ended(), worker.said
        assert code == 0, said
        route = await current_route(store)
        assert (route.versions, route.mode) == ({2} if mode == "replace" else {0, 2}, mode)

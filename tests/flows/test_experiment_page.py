"""The page that a look at an experiment leaves in Prefect."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

import msgspec

from babylon.core.settings import Settings
from babylon.evaluation.experiment.review import review
from babylon.store import Store
from babylon.tasks.experiment import leave_review
from tests.integration.experiments import SALT, world


async def test_a_look_leaves_the_experiments_page(
    store: Store, settings: Settings, pages: Callable[[str], Awaitable[list[str]]]
) -> None:
    """Also of numbers that came as JSON from another process."""
    fleet = await world(store)
    await fleet.begin()
    fleet.fleet(gain=200, agents=44)
    await fleet.write()
    found = await review(store, settings.windows, settings.experiment)
    assert found is not None
    await leave_review(msgspec.json.decode(msgspec.json.encode(asdict(found))))
    (page,) = await pages("experiment")
    assert page.startswith(f"# Experiment {SALT}: not enough evidence yet\n")

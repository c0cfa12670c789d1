"""The crash matrix: killed at any of its side effects and started again, a window ends as if
nothing had happened. ``FAULTS=all`` (``make faults``) goes through every case, else a share."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from babylon.core.failpoints import NAMES, parse
from babylon.core.windows import WindowState
from tests.faults.matrix import QUICK, RECORDED, Case, cases
from tests.faults.world import WHOLE, World

ROOT = Path(__file__).parents[2]
ALL = list(cases())
CHOSEN = [case for case in ALL if WHOLE or case.name in QUICK]


Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="package")
def uninterrupted() -> Outcomes:
    """Filled by the first case that asks, by its settings that matter: outcome and number of
    judgments bought."""
    return {}


async def whole(world: World, known: Outcomes, case: Case, home: Path) -> dict[str, Any]:
    changes = case.leads_elsewhere
    if str(changes) not in known:
        async with world.place(home, **changes) as place:
            code, said = await place.run()
            assert code == 0, said
            assert any(place.settings.home.datasets.rglob("*.parquet")), "the run publishes itself"
            await place.later_runs()
            outcome = await place.outcome() | {"bought": place.judge.requests}
        assert [row["state"] for row in outcome["window"]] == [WindowState.DEPLOYED]
        assert len(outcome["trained"]) == 7 and outcome["bought"] > 1
        known[str(changes)] = outcome
    return known[str(changes)]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
async def test_a_killed_window_ends_as_if_nothing_had_happened(
    case: Case, world: World, uninterrupted: Outcomes, tmp_path: Path
) -> None:
    expected = await whole(world, uninterrupted, case, tmp_path / "uninterrupted")
    async with world.place(tmp_path / "home", **case.settings) as place:
        for failpoint in case.crashes:
            code, said = await place.run(failpoint)
            assert code == -signal.SIGKILL, f"{failpoint} was not reached: {said}"
            await place.lease_over()
        code, said = await place.run()
        assert code == 0 or "nothing was changed" in said, said
        await place.later_runs()
        outcome = await place.outcome()
        lost = place.settings.judge.concurrency if "judgment" in case.name else 0  # were on the way
        assert place.judge.requests <= expected["bought"] + lost
    for what, found in outcome.items():
        assert found == expected[what], what


def test_every_failpoint_in_the_source_is_registered_and_has_a_case() -> None:
    placed = {
        name
        for file in (ROOT / "babylon").rglob("*.py")
        for name in re.findall(r'\bfailpoint\("([^"]*)"\)', file.read_text())
    }
    assert placed == set(NAMES)
    killed = {name for case in [*ALL, *RECORDED] for crash in case.crashes for name in ends(crash)}
    assert killed == set(NAMES) and len(NAMES) >= 24
    assert {case.name for case in ALL} >= QUICK


def ends(crash: str) -> set[str]:
    return {name for (name, _), action in parse(crash).items() if action == "kill"}

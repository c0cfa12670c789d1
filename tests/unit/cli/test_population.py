"""The table of ``babylon population show``."""

import pytest

from babylon.cli import main, population
from babylon.ops.population_page import MemberStanding


def _member(number: int, fitness: float | None, error: float | None) -> MemberStanding:
    return MemberStanding(
        generation=0,
        member=number,
        parent=None,
        origin="founder",
        genes={"clip": 0.2},
        fitness=fitness,
        error=error,
        windows=1,
        chosen=0,
    )


def test_a_fitness_of_unknown_error_is_not_shown_as_exact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update that failed has the fitness of its window's worst sibling, and played nothing."""
    members = [_member(0, 4.0, 1.5), _member(1, -2.0, None), _member(2, None, None)]
    monkeypatch.setattr(population, "with_store", lambda *_: members)
    with pytest.raises(SystemExit) as left:
        main(["population", "show"])
    assert not left.value.code
    table = capsys.readouterr().out
    assert "+4.00 ± 1.50" in table and "-2.00" in table and "± 0.00" not in table

"""The supervisor's files, read by ``babylon status`` and ``babylon up`` while it changes them."""

from pathlib import Path

import pytest

from babylon.core.home import Home
from babylon.ops.up.in_force import note_problem, read_problem, written_at


def test_a_file_that_goes_while_it_is_read_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.at(tmp_path)
    (tmp_path / "run").mkdir()
    note_problem(home, "Prefect is away")
    assert read_problem(home) == "Prefect is away"
    note_problem(home, None)
    monkeypatch.setattr(Path, "exists", lambda _: True)  # it was there a moment ago
    assert read_problem(home) is None and written_at(home) is None

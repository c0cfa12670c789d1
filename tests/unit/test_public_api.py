"""``import babylon``: a light import, and public names that load when they are used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import babylon
from babylon.core.settings import Settings
from babylon.recorder import MarketOutcomesTracker, TrajectoryRecorder
from babylon.store import open_store

ROOT = Path(__file__).parents[2]
BEFORE_AND_AFTER = """
import os, sys
environment, modules = dict(os.environ), set(sys.modules)
import babylon
assert dict(os.environ) == environment
print(*sorted(name.partition(".")[0] for name in set(sys.modules) - modules))
"""


def test_import_babylon_loads_only_the_standard_library_and_changes_nothing(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", BEFORE_AND_AFTER],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "BABYLON_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(finished.stdout.split()) <= {"babylon", *sys.stdlib_module_names}
    assert list(tmp_path.iterdir()) == []


def test_public_names_are_those_of_their_modules() -> None:
    from babylon.art.backend import Backend  # here, because it takes seconds to import

    assert babylon.Backend is Backend
    assert babylon.MarketOutcomesTracker is MarketOutcomesTracker
    assert babylon.Settings is Settings
    assert babylon.TrajectoryRecorder is TrajectoryRecorder
    assert babylon.open_store is open_store
    assert babylon.__version__.count(".") == 2
    assert set(babylon.__all__) <= set(dir(babylon))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'babylon' has no attribute 'nonsense'"):
        babylon.nonsense  # noqa: B018

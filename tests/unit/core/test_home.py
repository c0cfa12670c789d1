"""References to files: relative to the home, so that it can move."""

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from babylon.core.api_keys import engine_secret
from babylon.core.artifacts import write_artifact
from babylon.core.errors import StorageError
from babylon.core.home import Home, remove_untouched
from babylon.core.processes import Processes


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "a home")


def test_a_path_in_the_home_is_found_again_in_a_home_that_moved(home: Home, tmp_path: Path) -> None:
    reference = home.reference(home.checkpoints / "2025-11-14T0900+short-e1")
    assert reference == "home:checkpoints/2025-11-14T0900+short-e1"
    moved = Home(tmp_path / "moved")
    assert moved.resolve(reference) == f"{moved.root}/checkpoints/2025-11-14T0900+short-e1"


@pytest.mark.parametrize("other", ["/data/qwen", "Qwen/Qwen2.5-0.5B-Instruct", "models/x"])
def test_any_other_path_and_a_model_of_the_hub_stay(
    home: Home, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home.reference(other) == other == home.resolve(other)
    home.root.mkdir()
    monkeypatch.chdir(home.root)
    assert home.reference(other) == other


def test_a_neighbour_whose_name_begins_alike_is_not_in_the_home(home: Home) -> None:
    assert home.reference(f"{home.root}-2/models/x") == f"{home.root}-2/models/x"


def test_a_home_behind_a_link_knows_its_own_files(home: Home, tmp_path: Path) -> None:
    (home.models / "x").mkdir(parents=True)
    link = tmp_path / "link"
    os.symlink(home.root, link)
    assert Home(link).reference(home.models / "x") == "home:models/x"
    assert Home(link).reference(link / "models" / "x") == "home:models/x"


def test_addresses_of_earlier_versions_are_read_and_foreign_schemes_refused(home: Home) -> None:
    assert home.resolve("file:///a%20b/x") == "/a b/x"
    with pytest.raises(StorageError, match="s3://bucket/x: only files"):
        home.resolve("s3://bucket/x")


def test_untouched_files_and_their_directories_are_removed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = home.scratch / "runner_storage" / "killed"
    run.mkdir(parents=True)
    elsewhere = home.root / "elsewhere"
    elsewhere.write_text("a model")
    (run / "link").symlink_to(elsewhere)
    (run / "flow.py").write_text("")
    monkeypatch.chdir(run)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("worker.sock")
        assert remove_untouched(home.scratch, time.time() + 60) == 1
        assert {path.name for path in run.iterdir()} == {"link", "worker.sock"}
    (run / "link").unlink()
    (run / "worker.sock").unlink()
    assert remove_untouched(home.scratch, time.time() + 60) == 0
    assert list(home.scratch.iterdir()) == [] and elsewhere.exists()


def test_what_was_just_unpacked_stays_whatever_its_date(home: Home) -> None:
    home.scratch.mkdir(parents=True)
    unpacked = home.scratch / "weights"
    unpacked.write_text("")
    os.utime(unpacked, (0, 0))
    assert remove_untouched(home.scratch, time.time() - 60) == 0 and unpacked.exists()
    assert remove_untouched(home.root / "missing", time.time()) == 0


def _artifact(root: Path) -> None:
    write_artifact(Home(root), pl.DataFrame({"prompt": ["?"]}), window_id="2025-11-14T07:00")


def _record(root: Path) -> None:
    Processes(home=root).record("mute", os.getpid())


@pytest.mark.parametrize("first", [_artifact, _record, engine_secret])
def test_a_home_is_closed_to_others_unless_its_operator_made_it(
    home: Home, first: Callable[[Path], object]
) -> None:
    before = os.umask(0o022)
    try:
        first(home.root)
        assert not home.root.stat().st_mode & stat.S_IRWXO
        home.root.chmod(0o2775)
        _artifact(home.root)
        assert stat.S_IMODE(home.root.stat().st_mode) == 0o2775
    finally:
        os.umask(before)

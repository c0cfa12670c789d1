"""Base models that lie in the home, and that are copied there."""

import os
import shutil
from pathlib import Path

import pytest

from babylon.core.home import Home
from babylon.policies.shared_files import in_the_home, name_of_base


def test_a_base_model_in_the_home_keeps_its_name_when_the_home_moves(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    (home.models / "mine").mkdir(parents=True)
    inside = str(home.models / "mine")
    assert name_of_base(home, inside) == "home:models/mine"
    assert name_of_base(home, os.path.relpath(home.models / "mine")) == ("home:models/mine")
    os.rename(home.root, tmp_path / "moved")
    moved = str(tmp_path / "moved" / "models" / "mine")
    assert name_of_base(Home(tmp_path / "moved"), moved) == "home:models/mine"


def test_any_other_base_model_keeps_its_setting(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    for base in (None, str(tmp_path), "Qwen/Qwen2.5-0.5B-Instruct"):
        assert name_of_base(home, base) == base


def test_a_base_model_is_copied_into_the_home_after_a_crash_and_by_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, base = Home(tmp_path / "home", store="memory://"), tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    left = home.models / f".base-{os.getpid()}.tmp"
    left.mkdir(parents=True)
    copied = shutil.copytree

    def after_another(source: Path, part: Path) -> None:
        copied(source, home.models / "base")
        copied(source, part)

    monkeypatch.setattr(shutil, "copytree", after_another)
    assert in_the_home(home, str(base)) == str(home.models / "base")
    assert [one.name for one in home.models.iterdir()] == ["base"]

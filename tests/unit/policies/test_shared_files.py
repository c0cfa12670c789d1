"""The name of a base model that lies in the home."""

import os
from pathlib import Path

from babylon.core.home import Home
from babylon.policies.shared_files import name_of_base


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

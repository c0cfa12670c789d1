"""The base model of an adapter, in a home that moved."""

import json
from pathlib import Path

import pytest

from babylon.policies.checkpoint_files import (
    adapter_base,
    checkpoint_digest,
    make_portable,
    shape_of,
)
from tests.tiny_policy import tiny_model, tiny_tokenizer


def adapter(home: Path, base: str) -> Path:
    directory = home / "checkpoints" / "v1"
    directory.mkdir(parents=True)
    (home / "models" / "tiny").mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return directory


def test_an_adapter_names_the_base_of_its_own_home_wherever_that_is(tmp_path: Path) -> None:
    path = adapter(tmp_path / "old", str(tmp_path / "old" / "models" / "tiny"))
    make_portable(path, path)
    assert adapter_base(str(path)) == str(tmp_path / "old" / "models" / "tiny")
    digest = checkpoint_digest(str(path))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / "checkpoints" / "v1"
    assert adapter_base(str(moved)) == str(tmp_path / "new" / "models" / "tiny")
    assert checkpoint_digest(str(moved)) == digest


def test_a_base_outside_the_home_and_one_of_the_hub_keep_their_names(tmp_path: Path) -> None:
    for number, base in enumerate(("/data/models/qwen", "Qwen/Qwen2.5-0.5B-Instruct")):
        path = adapter(tmp_path / str(number), base)
        make_portable(path, path)
        assert adapter_base(str(path)) == base


def test_an_adapter_beside_the_root_is_in_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a container mounts one: ``/adapter``."""
    path = adapter(tmp_path, "/models/qwen")
    make_portable(path, Path("/adapter"))
    monkeypatch.setattr(Path, "absolute", lambda _: Path("/adapter"))
    assert adapter_base(str(path)) == "/models/qwen"


def test_a_copied_home_with_absolute_paths_uses_its_own_base(tmp_path: Path) -> None:
    (tmp_path / "old" / "models" / "tiny").mkdir(parents=True)
    path = adapter(tmp_path / "copy", str(tmp_path / "old" / "models" / "tiny"))
    assert adapter_base(str(path)) == str(tmp_path / "copy" / "models" / "tiny")


def test_checkpoints_have_one_shape_if_only_the_values_of_their_weights_differ(
    tmp_path: Path,
) -> None:
    def saved(name: str, seed: int = 0, **changes: int) -> Path:
        tiny_model(seed, **changes).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    one, other = saved("one"), saved("other", seed=1)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    deeper, chatty = saved("deeper", num_hidden_layers=3), saved("chatty")
    (chatty / "chat_template.jinja").write_text("{{ messages }}")
    shapes = [shape_of(str(path)) for path in (one, other, deeper, chatty)]
    assert shapes[0] == shapes[1]
    assert len({*shapes}) == 3
    assert shape_of("org/model") == "org/model"

import json
from pathlib import Path

import pytest

from babylon.cli import main
from babylon.cli.config import settings_markdown

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_of_settings_is_what_the_code_says() -> None:
    assert PAGE.read_text() == settings_markdown(), (
        "docs/settings.md is old: babylon config show --markdown > docs/settings.md"
    )


def test_show_says_where_each_value_comes_from_and_masks_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "babylon.toml").write_text("[quality]\nmin_actions = 2\n")
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OPENLINEAGE_URL", "https://me:sk-secret@catalogue:5000/path")
    monkeypatch.setattr("babylon.cli.signal.signal", lambda *_: None)
    with pytest.raises(SystemExit, match="0"):
        main(["config", "show", "--json"])
    printed = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(printed)["settings"]}
    assert rows["quality.min_actions"]["value"] == 2
    assert rows["quality.min_actions"]["source"] == str(tmp_path / "babylon.toml")
    assert rows["judge.api_key"]["source"] == "environment"
    assert rows["tracking.lineage_url"]["value"] == "https://********@catalogue:5000/path"
    assert rows["windows.minutes"] == {
        "name": "windows.minutes",
        "value": 60,
        "source": "default",
        "variable": "WINDOW_MINUTES",
    }
    assert "sk-secret" not in printed

"""The example of docs/envs.md runs as it stands."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[4] / "docs" / "envs.md"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    assert "P&L $" in capsys.readouterr().out
    assert names["observations"].keys() == {f"trader_{number}" for number in range(4)}

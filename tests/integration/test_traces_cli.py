"""``babylon db import|export`` and ``babylon dataset replay``, as an operator types them."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from babylon.cli import main
from babylon.core.settings_loading import load_settings
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.spawn import run_fleet
from babylon.store import open_store

WINDOW = "2025-11-14T09:00"
PLAN = FleetPlan(start=datetime(2025, 11, 14, 9, tzinfo=UTC), duration_min=5, agents=3)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def played(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet in the database that the environment names."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path / "home"))

    async def play() -> None:
        settings = load_settings()
        async with open_store(settings) as store:
            await run_fleet(store, settings, PLAN, "scripted")

    asyncio.run(play())


def run(*arguments: str) -> int:
    """The exit code."""
    try:
        main(arguments)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def answer(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    decoded: dict[str, Any] = json.loads(line)
    return decoded


def test_a_month_is_replayed_as_a_table_and_as_json(played: None, capsys: Capture) -> None:
    command = ("dataset", "replay", "--window", "2025-11", "--agent", "agent-1")
    assert run(*command) == 0
    assert "1 scenarios, mean P&L" in capsys.readouterr().out
    told = answer(capsys, *command, "--policy", "scripted:hold")
    assert told["mean_replayed_pnl"] == 0.0 and told["scenarios"][0]["prices"] == "exact"
    whole = answer(capsys, "dataset", "replay", "--agent", "agent-1")
    assert whole["scenarios"][0]["difference"] == pytest.approx(0.0, abs=0.01)


def test_what_goes_out_comes_back_in(played: None, capsys: Capture, tmp_path: Path) -> None:
    for format, count in (("atif", 3), ("chat", 15)):
        file = str(tmp_path / f"{format}.jsonl")
        export = ("db", "export", "--window", WINDOW, "--format", format, "-o", file)
        assert answer(capsys, *export) == {"lines": count}
        assert set(answer(capsys, "db", "import", file).values()) == {0}
        assert run(*export) == 1
        assert "exists already" in capsys.readouterr().err
    written = answer(
        capsys, "db", "export", "--window", WINDOW, "--format", "game", "-o", str(tmp_path / "all")
    )
    assert written["trajectories"] == 3
    assert set(answer(capsys, "db", "import", str(tmp_path / "all" / "users.jsonl"))) == {"User"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["dataset", "replay", "--agent", "a", "--window", "2024-01"], 1, "--from"),
        (["db", "export", "--window", "noon", "--format", "chat", "-o", "x"], 1, "window id"),
    ],
)
def test_what_cannot_be_done_is_said_with_a_remedy(
    played: None, capsys: Capture, arguments: list[str], code: int, message: str
) -> None:
    assert run(*arguments) == code
    assert message in " ".join(capsys.readouterr().err.split())

"""Progress: every stage is heard, under the window that it belongs to."""

from io import StringIO

import pytest
from rich.console import Console

from babylon.cli.progress import STAGES, stage_progress
from babylon.core.settings import Settings
from babylon.flows.train_window import train_window
from babylon.tasks.stage import listener
from tests.flows.conftest import Workshop

WINDOW = "2025-11-14T09:00"


async def test_the_listener_hears_each_stage_in_order_and_the_steps_of_training(
    played: Settings, workshop: Workshop
) -> None:
    heard: list[tuple[str, str, int, int]] = []
    token = listener.set(lambda *event: heard.append(event))
    await train_window(WINDOW)
    listener.reset(token)
    assert {window for window, *_ in heard} == {WINDOW}
    assert tuple(stage for _, stage, _, total in heard if not total) == STAGES
    assert (WINDOW, "train", 1, 2) in heard


def test_a_backfill_shows_how_many_windows_are_over_and_the_stages_of_the_present_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Console(file=StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("babylon.cli.progress.stderr", terminal)
    with stage_progress():
        hear = listener.get()
        assert hear is not None
        for event in [("run", "windows", 0, 3), (WINDOW, "train", 3, 20), ("run", "windows", 1, 3)]:
            hear(*event)
        hear("2025-11-14T10:00", "collect", 0, 0)
    assert isinstance(terminal.file, StringIO)
    last = terminal.file.getvalue().split("windows")[-1]
    assert "1/3" in last and "2025-11-14T10:00" in last and WINDOW not in last


def test_months_of_windows_show_the_bar_of_the_present_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Console(file=StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("babylon.cli.progress.stderr", terminal)
    with stage_progress():
        hear = listener.get()
        assert hear is not None
        for hour in range(24):
            for stage in STAGES:
                hear(f"2025-11-14T{hour:02}:00", stage, 0, 0)
    assert isinstance(terminal.file, StringIO)
    last = terminal.file.getvalue().split("\x1b[?25h")[0].split("\x1b[2K")[-1]
    assert "T23:00" in last and "T22:00" not in last

"""Progress: every stage is heard, under the window that it belongs to."""

from io import StringIO

import pytest
from rich.console import Console

from babylon.cli.progress import STAGES, stage_progress
from babylon.core.settings import Settings
from babylon.flows.train_window import train_window
from babylon.tasks.progress import listener
from tests.flows.conftest import Workshop

WINDOW = "2025-11-14T09:00"


async def test_the_listener_hears_stages_and_steps(played: Settings, workshop: Workshop) -> None:
    heard: list[tuple[str, str, int, int]] = []
    token = listener.set(lambda *event: heard.append(event))
    await train_window(WINDOW)
    listener.reset(token)
    assert {window for window, *_ in heard} == {WINDOW}
    assert tuple(stage for _, stage, _, total in heard if not total) == STAGES
    assert (WINDOW, "train", 1, 2) in heard


def shown(monkeypatch: pytest.MonkeyPatch, *events: tuple[str, str, int, int]) -> str:
    """All that the terminal gets."""
    written = StringIO()
    terminal = Console(file=written, force_terminal=True, width=100)
    monkeypatch.setattr("babylon.cli.progress.stderr", terminal)
    with stage_progress():
        hear = listener.get()
        assert hear is not None
        for event in events:
            hear(*event)
    return written.getvalue()


def test_a_backfill_shows_windows_done_and_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    done = ("run", "windows", 0, 3), (WINDOW, "train", 3, 20), ("run", "windows", 1, 3)
    last = shown(monkeypatch, *done, ("2025-11-14T10:00", "collect", 0, 0)).split("windows")[-1]
    assert "1/3" in last and "2025-11-14T10:00" in last and WINDOW not in last


@pytest.mark.parametrize("stage", ["approval", "experiment"])
def test_a_stage_that_few_windows_have_is_named_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    assert stage in shown(monkeypatch, (WINDOW, "score", 0, 0), (WINDOW, stage, 0, 0))


def test_months_of_windows_show_only_the_present_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [(f"2025-11-14T{hour:02}:00", stage, 0, 0) for hour in range(24) for stage in STAGES]
    last = shown(monkeypatch, *events).split("\x1b[?25h")[0].split("\x1b[2K")[-1]
    assert "T23:00" in last and "T22:00" not in last


def test_retention_after_all_windows_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "busy-lemur" not in shown(monkeypatch, ("busy-lemur", "retire", 0, 0))

"""Progress: every stage is heard, under the window that it belongs to."""

from babylon.settings import Settings
from flows.console import STAGES
from flows.train_window import train_window
from tasks.stage import listener
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

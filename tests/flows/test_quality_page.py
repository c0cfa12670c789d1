"""The page that validation leaves in Prefect."""

from collections.abc import Awaitable, Callable

from babylon.core.settings import Settings
from babylon.core.windows import WindowState
from babylon.flows.train_window import train_window
from tests.flows.conftest import Workshop

WINDOW = "2025-11-14T09:00"


async def test_a_refused_window_has_its_page_too(
    played: Settings, workshop: Workshop, pages: Callable[[str], Awaitable[list[str]]]
) -> None:
    result = await train_window(WINDOW, overrides={"windows": {"min_agents": 6}})
    assert (result.status, workshop.trained) == (WindowState.SKIPPED, [])
    (page,) = await pages("quality")
    title, *_, last = page.splitlines()
    assert title == f"# {WINDOW}: 5 trajectories accepted, 10 rejected"
    assert "| no_llm_call | 10 | `247649324240994304` | `3 steps without an LLM call` |" in page
    assert last.startswith("|  |  | `")

"""Traces of a window's run for people: a named state, lines in its log, and three pages."""

import asyncio
import logging
import re

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from babylon.core.errors import TrainingError
from babylon.core.settings import Settings
from babylon.core.types import WindowResult
from babylon.flows.train_window import train_window
from babylon.store import Store
from babylon.tasks import progress
from babylon.tasks.stage import stage
from tests.flows.conftest import Workshop

WINDOW = "2025-11-14T09:00"
HOSTILE = "![x](https://evil.example) <b>"
NO_PLAY = {"windows": {"min_agents": 6}}


async def ended(overrides: dict[str, dict[str, int]] | None = None) -> tuple[str, WindowResult]:
    state = await train_window(WINDOW, overrides, return_state=True)
    result: WindowResult = await state.aresult()
    return state.name or "", result


async def page_of(kind: str) -> str:
    """The newest version of a page; other tests share the server."""
    named = ArtifactFilter(key=ArtifactFilterKey(any_=[kind]))
    async with get_client() as client:
        (newest,) = await client.read_artifacts(
            artifact_filter=named, sort=ArtifactSort.CREATED_DESC, limit=1
        )
    return str(newest.data)


@pytest.mark.parametrize(("promote", "name"), [(True, "Deployed"), (False, "Rejected")])
async def test_the_state_is_named_and_the_log_tells_the_story(
    played: Settings,
    workshop: Workshop,
    caplog: pytest.LogCaptureFixture,
    promote: bool,
    name: str,
) -> None:
    workshop.promote = promote
    with caplog.at_level(logging.INFO, "babylon"):
        assert (await ended())[0] == name
    said = [r.getMessage() for r in caplog.records if r.name == "babylon.flows"]
    assert len(said) >= 10
    text = "\n".join(said)
    assert "collect: 15 trajectories of window" in text
    assert "validate: 10 rejected as no_llm_call" in text
    assert "train: policy 0 became policy 1" in text
    assert re.search(rf"window {WINDOW} is {name.lower()} after \d", text)


async def test_the_pages_show_play_update_verdict_and_route(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    await store.pool.execute('INSERT INTO "User" (id) VALUES ($1)', HOSTILE)
    await store.pool.execute(
        'UPDATE trajectories SET "agentId" = $1 WHERE "agentId" = (SELECT min("agentId")'
        ' FROM trajectories JOIN llm_call_logs USING ("trajectoryId"))',
        HOSTILE,
    )
    await train_window(WINDOW)
    page = await page_of("window")
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings == [
        "Who played",
        "What was rejected, and why",
        "Best and worst",
        "The update",
        "The gate",
        "What went live",
    ]
    assert f"| `{HOSTILE}` |" in page
    assert "(data:image/svg+xml;base64," in page and str(played.home.root) not in page
    assert "Policy 1 serves as champion" in page
    assert f"| {WINDOW} | deployed |" in await page_of("fleet")
    night = await page_of("tonight")
    assert ": 1 deployed" in night and "| 2 |" in night and "not worse" in night


async def test_a_skipped_and_a_failed_window_have_their_page_too(
    played: Settings, workshop: Workshop
) -> None:
    assert (await ended(NO_PLAY))[0] == "Skipped"
    assert (await page_of("window")).startswith(f"# Window {WINDOW}: skipped")
    workshop.training_error = TrainingError("no memory")
    with pytest.raises(TrainingError):
        await train_window(WINDOW)
    page = await page_of("window")
    assert page.startswith(f"# Window {WINDOW}: failed") and "no memory" in page


async def test_progress_of_a_long_stage_is_fresh_on_its_page(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "FRESH_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    seen: list[tuple[float, str]] = []
    enough = asyncio.Event()

    async def created(share: float, description: str) -> str:
        seen.append((share, description))
        return "artifact"

    async def updated(_artifact: str, share: float, description: str) -> None:
        seen.append((share, description))
        if share == 75.0:
            enough.set()

    monkeypatch.setattr(progress, "acreate_progress_artifact", created)
    monkeypatch.setattr(progress, "aupdate_progress_artifact", updated)

    @stage("long")
    async def long() -> None:
        while not seen:
            await asyncio.sleep(0)
        await asyncio.to_thread(progress.announce, "long", 3, 4)
        await enough.wait()

    with caplog.at_level(logging.INFO, "babylon"):
        await long()
    assert seen[0][0] == 0.0 and "long: 3 of 4" in seen[-1][1]
    assert any("long: 3 of 4" in record.getMessage() for record in caplog.records)

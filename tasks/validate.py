"""Validate: accept what can be trained on, and reject the rest for a named reason."""

from babylon.core.errors import WindowNotReadyError
from babylon.core.settings import Settings
from babylon.core.types import Collected, Validated
from babylon.core.windows import WindowState
from babylon.quality.quality_page import quality_markdown
from babylon.stages.validate import validate_window
from babylon.store import Store, open_store
from babylon.store.rejections import window_rejections
from babylon.store.window_health import get_health
from babylon.store.windows import set_state
from babylon.tasks.page import leave_page
from babylon.tasks.stage import stage


@stage("validate")
async def validate(settings: Settings, collected: Collected) -> Validated:
    """Check and commit. Leave a page of the rejections, also when the window is refused."""
    async with open_store(settings) as store:
        try:
            validated = await validate_window(store, settings, collected)
        except WindowNotReadyError:
            await _leave_quality(store, collected)
            raise
        await _leave_quality(store, collected)
        await set_state(store, collected.claim, WindowState.VALIDATED)
    return validated


async def _leave_quality(store: Store, collected: Collected) -> None:
    window_id = collected.claim.window_id
    reasons = await window_rejections(store, window_id)
    accepted = collected.artifact.rows - sum(reason.count for reason in reasons)
    health = await get_health(store, window_id)
    page = quality_markdown(window_id, accepted, reasons, health)
    await leave_page("quality", window_id, page, "which trajectories can be trained on")

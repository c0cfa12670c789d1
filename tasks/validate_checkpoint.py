"""Validate checkpoint: challenger and champion play the same unseen scenarios."""

import asyncio
from pathlib import Path

from babylon.core.home import Home
from babylon.core.settings import Settings
from babylon.core.types import Trained, Verdict
from babylon.evaluation.arena.match_page import verdict_markdown
from babylon.ops.pages.markdown import picture
from babylon.ops.pages.pictures import gate_pictures
from babylon.stages import validate_checkpoint as gate
from babylon.store import open_store
from babylon.tasks.limits import GPU_MEMORY, limited
from babylon.tasks.page import leave_page
from babylon.tasks.progress import announce
from babylon.tasks.stage import stage


@stage("validate checkpoint")
async def validate_checkpoint(settings: Settings, trained: Trained) -> Verdict:
    """Store the verdict with the policy, promoted or not, and leave it as a page."""

    def progress(done: int, total: int) -> None:
        announce("validate checkpoint", done, total)

    async with limited(GPU_MEMORY), open_store(settings) as store:
        verdict = await gate.validate_checkpoint(store, settings, trained, progress=progress)
    page = await asyncio.to_thread(_page, settings.home, verdict)
    summary = f"{verdict.ruling} policy {verdict.policy_version}"
    await leave_page("gate", verdict.claim.window_id, page, summary)
    return verdict


def _page(home: Home, verdict: Verdict) -> str:
    report = Path(home.resolve(verdict.report)) if verdict.report else None
    lines = [verdict_markdown(verdict), ""]
    for name, image in gate_pictures(report).items():
        lines += picture(name, image)
    return "\n".join(lines)

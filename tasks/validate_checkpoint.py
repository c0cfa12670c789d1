"""Validate checkpoint: challenger and champion play the same unseen scenarios."""

from babylon.core.settings import Settings
from babylon.core.types import Trained, Verdict
from babylon.evaluation.arena.match_page import verdict_markdown
from babylon.stages import validate_checkpoint as gate
from babylon.store import open_store
from babylon.tasks.page import leave_page
from babylon.tasks.stage import announce, stage


@stage("validate checkpoint")
async def validate_checkpoint(settings: Settings, trained: Trained) -> Verdict:
    """Store the verdict with the policy, promoted or not, and leave it as a page."""

    def progress(done: int, total: int) -> None:
        announce("validate checkpoint", done, total)

    async with open_store(settings) as store:
        verdict = await gate.validate_checkpoint(store, settings, trained, progress=progress)
    page = verdict_markdown(verdict)
    summary = f"{verdict.ruling} policy {verdict.policy_version}"
    await leave_page("arena", verdict.claim.window_id, page, summary)
    return verdict

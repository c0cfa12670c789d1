"""Deploy: the checkpoint goes out if its verdict says so, or an experiment is decided."""

from babylon.core.settings import Settings
from babylon.core.types import Deployed, Verdict
from babylon.deployment.deploy_page import deployed_markdown
from babylon.stages.deploy import deploy_checkpoint
from babylon.store import open_store
from babylon.tasks.experiment import leave_review
from babylon.tasks.page import leave_page
from babylon.tasks.stage import stage


@stage("deploy")
async def deploy(settings: Settings, verdict: Verdict) -> Deployed:
    """Returns when every live gateway serves the new route; leaves what was done as a page."""
    async with open_store(settings) as store:
        deployed = await deploy_checkpoint(store, settings, verdict)
    page = deployed_markdown(deployed, verdict)
    summary = f"policy {verdict.policy_version}: {deployed.arm or 'not deployed'}"
    if deployed.review:
        await leave_review(deployed.review)
    await leave_page("deploy", verdict.claim.window_id, page, summary)
    return deployed

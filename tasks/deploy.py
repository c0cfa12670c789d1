"""Deploy: send out the checkpoint if its verdict allows it, or decide the running experiment."""

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
    """Return when every live gateway serves the new route. Leave a page of what was done."""
    async with open_store(settings) as store:
        deployed = await deploy_checkpoint(store, settings, verdict)
    page = deployed_markdown(deployed, verdict)
    summary = f"policy {verdict.policy_version}: {deployed.arm or 'not deployed'}"
    if deployed.review:
        await leave_review(deployed.review)
    await leave_page("deploy", verdict.claim.window_id, page, summary)
    return deployed

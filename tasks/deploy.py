"""Deploy: make the challenger the champion if its verdict says so."""

from babylon.deploy import deploy_checkpoint
from babylon.settings import Settings
from babylon.store import open_store
from babylon.types import Deployed, Verdict
from tasks.stage import stage


@stage("deploy")
async def deploy(settings: Settings, verdict: Verdict) -> Deployed:
    """Returns when every live gateway serves the new route."""
    async with open_store(settings) as store:
        return await deploy_checkpoint(store, verdict)

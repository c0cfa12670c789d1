"""Validate: accept what can be trained on, and give every other trajectory a named reason."""

from prefect.artifacts import acreate_table_artifact

from babylon.quality import validate_window
from babylon.settings import Settings
from babylon.store import open_store
from babylon.types import Collected, Validated
from tasks.stage import stage


@stage("validate")
async def validate(settings: Settings, collected: Collected) -> Validated:
    """Leaves the table of rejections as a Prefect artifact."""
    async with open_store(settings) as store:
        validated = await validate_window(store, settings, collected)
    await acreate_table_artifact(
        table=[{"reason": reason, "trajectories": n} for reason, n in validated.rejected.items()],
        key="rejected-trajectories",
        description=f"{collected.claim.window_id}: accepted {validated.artifact.rows} trajectories"
        f" of {validated.agents} agents",
    )
    return validated

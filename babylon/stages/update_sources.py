"""Earlier policies that an update needs: their ages, and an optimiser."""

import asyncio
import logging
from collections.abc import Sequence

from babylon.core.errors import ArtifactError, ModelError
from babylon.core.trajectories import TrainingRow
from babylon.policies.shared_files import fetch_checkpoint
from babylon.store.connection import Store
from babylon.store.lineage import parents, rejected_child, staleness
from babylon.store.policies import Policy
from babylon.training.update_health import ruled_out

log = logging.getLogger(__name__)


async def staleness_of(store: Store, parent: Policy, rows: Sequence[TrainingRow]) -> dict[int, int]:
    """Return policy version → its number of updates before ``parent``.

    Only policies that played are in it: the update does not depend on what was trained since.
    """
    played = {call.policy_version for row in rows for call in row.calls}
    ages = staleness(await parents(store), parent.policy_version)
    return {version: age for version, age in ages.items() if version in played}


async def optimizer_of(store: Store, parent: Policy) -> str:
    """Return the checkpoint whose optimiser goes on: that of the newest update of ``parent``.

    Its moments and its rate belong to ``parent``'s weights, whatever the gate thought of the
    result. An update that its own metrics rule out is not continued.
    """
    child = await rejected_child(store, parent.policy_version)
    if child is None or ruled_out(child[1]):
        return parent.uri
    try:
        return await asyncio.to_thread(fetch_checkpoint, store.home, child[0])
    except (ArtifactError, ModelError) as error:  # the update needs no rejected checkpoint
        log.warning("the optimiser of policy %d goes on: %s", parent.policy_version, error)
        return parent.uri

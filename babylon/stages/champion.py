"""The policy that serves. The base model is the first."""

import asyncio
from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.home import Home
from babylon.core.settings import ModelSettings
from babylon.policies import shared_files as files
from babylon.store.connection import Store
from babylon.store.policies import Policy, champion, ensure_base, list_policies
from babylon.training.base_model import Progress, resolve_base_in_a_thread


async def ensure_champion(
    store: Store,
    home: Home,
    model: ModelSettings,
    seed: int,
    *,
    progress: Progress | None = None,
) -> Policy:
    """Return the serving policy. Without any policy, register the base model as version 0.

    Raises:
        ConfigError: ``BASE_MODEL`` names another model than the one this home started with.
    """
    named = files.name_of_base(home, model.base)
    if not await list_policies(store):
        found = await resolve_base_in_a_thread(model.base, home.models, seed, progress)
        base = await asyncio.to_thread(files.in_the_home, home, str(found))
        digest = await asyncio.to_thread(files.publish_checkpoint, home, base)
        await ensure_base(store, uri=base, base_model=named or Path(base).name, digest=digest)
    policy, _ = await champion(store)
    await asyncio.to_thread(files.fetch_checkpoint, home, policy.uri)  # made elsewhere, perhaps
    if model.base and policy.base_model not in (model.base, named):
        raise ConfigError(
            f"BASE_MODEL is {model.base!r}, but the policies here descend from"
            f" {policy.base_model!r}: use another BABYLON_HOME, or unset BASE_MODEL"
        )
    return policy

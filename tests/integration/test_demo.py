"""The demo keeps to its own database, whatever the shell it is started from exports."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from babylon.core.settings_loading import load_settings
from babylon.ops.demo import demo_overrides
from babylon.store import open_store

NOWHERE = "postgresql://game@127.0.0.1:1/game"


@pytest.mark.parametrize("exported", ["DATABASE_URL", "BABYLON_DATABASE_URL"])
async def test_a_demo_opens_its_embedded_database_and_so_does_its_gateway(
    exported: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(exported, NOWHERE)
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path))
    outer = load_settings()
    overrides = demo_overrides(outer.home, outer.seed, datetime.now(UTC))
    settings = load_settings(**overrides)
    assert settings.home.root.parent == tmp_path / "demo"
    async with open_store(settings) as store:
        assert store.game_tables_ours
    for name, value in settings.environment().items():  # what the gateway is started with
        monkeypatch.setenv(name, value)
    assert load_settings() == settings

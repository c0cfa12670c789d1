"""The demo keeps to its own database, whatever the shell it is started from exports."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from babylon.core.home import Home
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.windows import WindowState, window_at
from babylon.game.fleet.fleet_plan import plan_rounds
from babylon.game.market.scenario import HOUR
from babylon.ops.demo import GAMES, _plans, _taught, demo_overrides
from babylon.ops.rehearsal import live_plan
from babylon.policies.load import load_policy
from babylon.store import Store, open_store
from babylon.store.windows import set_state
from tests.integration.test_train_stage import base, rows, scored
from tests.tiny_policy import plain_logprobs

__all__ = ["base"]  # a fixture

NOWHERE = "postgresql://game@127.0.0.1:1/game"


@pytest.mark.parametrize("exported", ["DATABASE_URL", "BABYLON_DATABASE_URL"])
async def test_a_demo_opens_its_embedded_database_and_so_does_its_gateway(
    exported: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(exported, NOWHERE)
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path))
    outer = load_settings()
    overrides = demo_overrides(outer.home, outer.seed, datetime.now(UTC), GAMES["starter"], None)
    settings = load_settings(**overrides)
    assert settings.home.root.parent == tmp_path / "demo"
    async with open_store(settings) as store:
        assert store.game_tables_ours
    for name, value in settings.environment().items():  # what the gateway is started with
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


@pytest.mark.parametrize("live", [False, True])
def test_a_demo_reads_no_live_game_and_sends_nothing_anywhere(
    live: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its files have the same names in each home, so a store would mix them with others'."""
    monkeypatch.setenv("GAME_DATABASE_URL", NOWHERE)
    monkeypatch.setenv("ARTIFACT_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("PUBLISH_TO", "owner/plays")
    monkeypatch.setenv("PUBLISH_MODELS_TO", "owner/policies")
    overrides = demo_overrides(
        Home(tmp_path), 0, datetime.now(UTC), GAMES["starter"], None, live=live
    )
    settings = load_settings(**overrides)
    assert settings.database.game_url is None and settings.home.store == ""
    assert settings.publish.repository is None and settings.publish.models is None


@pytest.mark.parametrize("live", [False, True])
def test_the_agents_of_a_demo_are_enough_for_its_windows(
    live: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rehearsal would wait for ever for a window that is not trained."""
    monkeypatch.setenv("MIN_AGENTS_PER_WINDOW", "1000")
    overrides = demo_overrides(
        Home(tmp_path), 0, datetime.now(UTC), GAMES["starter"], None, live=live
    )
    assert load_settings(**overrides).windows.min_agents <= GAMES["starter"].agents


@pytest.mark.parametrize("variable", ["WINDOW_MINUTES=120", "WINDOW_DURATION_HOURS=24"])
def test_each_hour_of_a_demo_is_a_window(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(*variable.split("="))
    overrides = demo_overrides(Home(tmp_path), 0, datetime.now(UTC), GAMES["starter"], None)
    minutes = load_settings(**overrides).windows.minutes
    plans = _plans(GAMES["starter"], 0, 3, shared=False)
    assert [window_at(plan.start, minutes).start for plan in plans] == [p.start for p in plans]


async def test_the_base_model_is_taught_the_best_play_of_each_scenario(
    store: Store, settings: Settings, base: Path
) -> None:
    """Of six replies the last has the highest score, and gains most."""
    window = await scored(store, settings, 9, rows(base, version=0))
    await set_state(store, window.claim, WindowState.FAILED, scored=window)
    taught = await _taught(store, settings.home, str(base))

    def likelihoods(path: Path) -> list[float]:
        model, _ = load_policy(path)
        calls = [row.calls[0] for row in rows(base, version=0)]
        return [
            float(plain_logprobs(model, c.prompt_token_ids, c.completion_token_ids).sum())
            for c in calls
        ]

    before, after = likelihoods(base), likelihoods(taught)
    gained = [late - early for early, late in zip(before, after, strict=True)]
    assert gained[-1] > 0 and gained[-1] == max(gained)


@pytest.mark.parametrize(
    ("own", "base"), [(None, "embedded:hour"), ("/models/mine", "/models/mine")]
)
def test_a_demo_of_the_full_hour_has_a_base_model_for_it(
    own: str | None, base: str, tmp_path: Path
) -> None:
    overrides = demo_overrides(Home(tmp_path), 3, datetime.now(UTC), GAMES["hour"], own)
    settings = load_settings(**overrides)
    assert settings.model.base == base
    plans = _plans(GAMES["hour"], settings.seed, 3, shared=True)
    assert [plan.start.hour for plan in plans] == [0, 1, 2]
    assert all(plan.rules == HOUR and plan.shared and plan.duration_min == 60 for plan in plans)
    assert len({plan.fleet_id for plan in plans}) == 3


@pytest.mark.parametrize(
    ("now", "start", "minutes"),
    [
        ("12:00:09", "12:00", 15),  # an earlier window took nine seconds to end
        ("12:09:59", "12:09", 6),
        ("12:10:00", "12:15", 15),  # a game of six minutes does not fit
    ],
)
def test_a_rehearsal_plays_what_is_left_of_a_window_if_a_game_fits(
    now: str, start: str, minutes: int, tmp_path: Path
) -> None:
    game = GAMES["starter"]
    overrides = demo_overrides(Home(tmp_path), 0, datetime.now(UTC), game, None, live=True)
    moment = datetime.fromisoformat(f"2026-01-01T{now}+00:00")
    plan = live_plan(game, load_settings(**overrides).windows.minutes, moment)
    assert f"{plan.start:%H:%M}" == start and plan.duration_min == minutes
    assert plan.live and plan.window_minutes == 15
    (window,) = {window_at(begun, 15).id for begun, _ in plan_rounds(plan)}
    assert window == window_at(plan.start, 15).id


def test_a_rehearsal_of_the_hour_has_windows_of_an_hour(tmp_path: Path) -> None:
    overrides = demo_overrides(Home(tmp_path), 0, datetime.now(UTC), GAMES["hour"], None, live=True)
    assert load_settings(**overrides).windows.minutes == 60

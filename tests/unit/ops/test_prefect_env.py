"""The Prefect API that a home's programs call, and the environment that names it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from babylon.core.api_keys import engine_secret, make_prefect_auth, prefect_auth_path
from babylon.core.errors import ConfigError
from babylon.core.home import Home
from babylon.core.settings import PrefectSettings
from babylon.core.settings_loading import load_settings
from babylon.ops.prefect_env import (
    RETENTION_S,
    PrefectApi,
    inline_environment,
    prefect_api,
    remove_old_results,
    results,
    served_environment,
)
from babylon.ops.up.prefect_setup import STALE_RUNS
from babylon.ops.up.services import services

CLOUD = "https://api.prefect.cloud/api/accounts/one/workspaces/two"


def api_of(home: Path, **settings: object) -> PrefectApi:
    return prefect_api(Home(home), PrefectSettings.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "url", "embedded"),
    [
        ({"port": 4300}, "http://127.0.0.1:4300/api", True),
        ({"port": 4300, "api_url": "http://localhost:4300/api"}, "http://127.0.0.1:4300/api", True),
        ({"api_url": "http://127.0.0.1:4300/api"}, "http://127.0.0.1:4300/api", False),
        ({"api_url": "http://prefect.lan:4200/api/"}, "http://prefect.lan:4200/api", False),
        ({"api_url": CLOUD, "api_key": "pnu_x"}, CLOUD, False),
    ],
)
def test_our_own_server_is_told_from_another(
    tmp_path: Path, settings: dict[str, object], url: str, embedded: bool
) -> None:
    api = api_of(tmp_path, **settings)
    assert (api.url, api.embedded) == (url, embedded)


def test_the_pages_of_prefect_cloud_lie_on_another_host() -> None:
    assert PrefectApi(url=CLOUD).ui == "https://app.prefect.cloud/account/one/workspace/two"
    assert PrefectApi(url="http://127.0.0.1:4200/api").ui == "http://127.0.0.1:4200"
    assert PrefectApi(url="https://api.lan/prefect/api").ui == "https://api.lan/prefect"


def test_a_run_of_the_command_line_sends_the_heartbeats_that_the_server_waits_for(
    tmp_path: Path,
) -> None:
    """By default it sends one in 180 s, and was marked as crashed after 90 s of work."""
    for environment in (
        inline_environment(tmp_path),
        served_environment(Home(tmp_path), api_of(tmp_path), {}),
    ):
        every_s = int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        beats = [within for after, _, within in STALE_RUNS.values() if after == "heartbeat"]
        assert beats and all(3 * every_s <= within for within in beats)


def test_the_home_makes_one_password_that_opens_its_own_server_only(tmp_path: Path) -> None:
    assert api_of(tmp_path).headers == {}  # before the first `up`
    make_prefect_auth(tmp_path)
    path = prefect_auth_path(tmp_path)
    made = path.read_text()
    make_prefect_auth(tmp_path)
    assert path.read_text() == made and path.stat().st_mode & 0o777 == 0o600
    ours = api_of(tmp_path)
    assert ours.auth == made.strip()
    assert ours.headers["Authorization"].startswith("Basic ")
    served = served_environment(Home(tmp_path), ours, {})
    # In Prefect's own default a slot stays taken for ever when the server dies.
    assert served["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"].endswith(".filesystem")
    assert served["PREFECT_SERVER_UI_STATIC_DIRECTORY"].startswith(str(tmp_path))
    assert served["PREFECT_SERVER_API_AUTH_STRING"] == served["PREFECT_API_AUTH_STRING"]
    elsewhere = api_of(tmp_path, api_url=CLOUD, api_key="pnu_x")
    assert elsewhere.headers == {"Authorization": "Bearer pnu_x"}
    assert "PREFECT_SERVER_API_AUTH_STRING" not in served_environment(Home(tmp_path), elsewhere, {})


@pytest.mark.parametrize(
    ("name", "make"), [("prefect.key", make_prefect_auth), ("engine.key", engine_secret)]
)
def test_an_empty_secret_opens_nothing(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_text("\n")
    with pytest.raises(ConfigError, match=rf"{name} is empty: delete it"):
        make(tmp_path)


def test_with_an_api_elsewhere_no_server_is_started_and_workers_call_it(tmp_path: Path) -> None:
    prefect = {"api_url": CLOUD, "api_key": "pnu_x"}
    wanted = services(load_settings(home=tmp_path, prefect=prefect))
    assert [one.name for one in wanted] == ["serving", "worker-cpu", "worker-gpu"]
    assert wanted[1].environment["PREFECT_API_URL"] == CLOUD
    assert wanted[1].environment["PREFECT_API_KEY"] == "pnu_x"


def test_a_home_whose_first_command_is_status_is_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    services(load_settings(home=home))
    assert home.stat().st_mode & 0o007 == 0


def test_results_are_removed_when_their_run_is(tmp_path: Path) -> None:
    assert remove_old_results(Home(tmp_path)) == 0
    results(tmp_path).mkdir(parents=True)
    old, new = (results(tmp_path) / name for name in ("old", "new"))
    for file in (old, new):
        file.touch()
    then = new.stat().st_mtime - RETENTION_S - 1
    os.utime(old, (then, then))
    assert remove_old_results(Home(tmp_path)) == 1
    assert (old.exists(), new.exists()) == (False, True)

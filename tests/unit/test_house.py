"""Limits on the size and order of the source tree. Lower them, never raise them."""

from pathlib import Path

import pytest

from benchmarks.house import Figures, core_path, cycles, measure

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures() -> Figures:
    return measure(ROOT)


def test_the_tree_keeps_its_limits(figures: Figures) -> None:
    values = {
        "rooms": len(figures.rooms),
        "package cycles": len(figures.package_cycles),
        "module median": figures.modules.median,
        "module max": figures.modules.max,
        "function p95": figures.functions.p95,
        "function max": figures.functions.max,
        "long functions without a comment": figures.long_functions_without_comment,
        "shared class names": len(figures.shared_class_names),
        "functions that take all settings": figures.functions_that_take_all_settings,
        "TYPE_CHECKING blocks": figures.type_checking_blocks,
        "question-word openings, %": round(
            100 * figures.docstrings_that_open_with_a_question_word / figures.docstrings, 1
        ),
        "Any per 1,000 code lines": figures.any_per_1000_code_lines,
        "README lines": figures.readme_lines,
        "flow lines": figures.flow_lines,
        "core path lines": figures.core_path_lines,
    }
    limits = {
        "rooms": 17,
        "package cycles": 0,
        "module median": 115,
        "module max": 610,
        "function p95": 30,
        "function max": 80,
        # Without a choice to explain: long signatures, tables of names, SQL and texts.
        "long functions without a comment": 12,
        "shared class names": 0,
        "functions that take all settings": 31,
        "TYPE_CHECKING blocks": 9,
        "question-word openings, %": 1,
        "Any per 1,000 code lines": 6,
        "README lines": 145,
        "flow lines": 80,
        "core path lines": 3500,
    }
    assert {name: value for name, value in values.items() if value > limits[name]} == {}


def test_cycles_are_groups_that_reach_each_other() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set[str]()}
    assert cycles(arrows) == (("b", "c"),)


def test_the_core_path_is_read_from_the_architecture_page(tmp_path: Path) -> None:
    assert core_path(tmp_path) == []
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "architecture.md"
    page.write_text("`no.py`\n<!-- core-path -->\n1. `a.py` reads `Row`\n<!-- /core-path -->\n")
    with pytest.raises(FileNotFoundError, match=r"a\.py"):
        core_path(tmp_path)
    (tmp_path / "a.py").touch()
    assert core_path(tmp_path) == [tmp_path / "a.py"]

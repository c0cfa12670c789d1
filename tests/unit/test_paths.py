"""Paths that the pages name exist, links lead somewhere, and the core path stays short."""

import re
from pathlib import Path

import pytest

from tests.docs.test_pages import PAGES, ROOT

MODULE = re.compile(r"\b(?:babylon|flows|tasks|blocks|migrations|tests|examples)/[\w/]+\.py\b")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[)#]")
CORE_PATH = re.compile(r"<!-- core-path -->(.*?)<!-- /core-path -->", re.DOTALL)
CORE_LINES = 3500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = [ROOT / path for path in MODULE.findall(text)]
    linked = [page.parent / path for path in LINK.findall(text)]
    assert [str(path) for path in named + linked if not path.exists()] == []


def test_the_core_path_is_short() -> None:
    found = CORE_PATH.search((ROOT / "docs" / "architecture.md").read_text())
    assert found is not None
    files = MODULE.findall(found[1])
    assert len(files) == len(set(files)) > 10
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    assert lines <= CORE_LINES

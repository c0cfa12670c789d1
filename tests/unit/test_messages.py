"""The messages that docs/troubleshooting.md quotes are those of the code, word by word."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from babylon.cli import app
from benchmarks.house import PRODUCT, python_files
from tests.docs.test_pages import blocks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = [" ".join(block.code.split()) for block in blocks_of(PAGE) if block.language == "text"]
WORD = r"(?<![\w.])[a-z]+(?![\w.:])"
VALUES = (  # also phrases of pydantic, Postgres and the kernel
    "is open",
    "checks none",
    "Input should be a valid integer, unable to parse string as an integer",
    "could not extend file",
    "wrote only 4096 of 8192 bytes at block",
    "Read-only file system",
    "No space left on device",
    "No such file or directory",
    "Connect call failed",
)
Template = tuple[str | None, ...]  # the parts of an f-string; None stands for a value


@pytest.fixture(scope="module")
def templates() -> set[Template]:
    """The literals and f-strings of the product with at least eight characters."""
    found: set[Template] = set()
    for path in python_files(ROOT, *PRODUCT):
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[ast.AST] = [*node.values] if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            template = tuple(part for text in texts for part in parts_of(text))
            if sum(len(text) for text in template if text) >= 8:
                found.add(template)
    return found


def parts_of(text: object) -> Template:
    """Split a text of a log call at its values."""
    if not isinstance(text, str):
        return (None,)
    first, *others = text.split("%s")
    return (first, *(part for other in others for part in (None, other)))


@pytest.mark.parametrize("message", MESSAGES)
def test_every_phrase_of_a_quoted_message_is_in_the_code(
    message: str, templates: set[Template]
) -> None:
    values = message
    for words in VALUES:
        values = values.replace(words, "|" * len(words))
    rest = list(values)
    for template in templates:
        if not all(text in message for text in template if text):
            continue
        groups = ["(.*?)" if text is None else f"({re.escape(text)})" for text in template]
        if found := re.search("".join(groups), message):
            for number, text in enumerate(template, start=1):
                if text and len(text.strip()) > 2:
                    begin, end = found.span(number)
                    rest[begin:end] = "|" * (end - begin)
    assert re.findall(f"{WORD},? {WORD}", "".join(rest)) == []


def test_a_command_that_a_message_tells_to_run_has_its_options(templates: set[Template]) -> None:
    texts = ["".join("ID" if part is None else part for part in one) for one in templates]
    named = {tuple(run.split()) for text in texts for run in re.findall(r"`babylon ([^`]+)`", text)}
    wrong = []
    for words in named:
        command, left = _command(words)
        given = {word.partition("=")[0] for word in left if word.startswith("--")}
        options = [one for one in command.params if one.param_type_name == "option"]
        known = {name for one in options for name in one.opts} | {"--help"}
        # A command without anything behind it is named, and not one to copy.
        missing = [one for one in options if left and one.required and not given & {*one.opts}]
        if missing or not given <= known:
            wrong.append(" ".join(words))
    assert len(named) > 50 and wrong == []


def _command(words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Return the command that words name, and the words behind its name."""
    command: Any = get_command(app)
    for at, word in enumerate(words):
        if word not in getattr(command, "commands", {}):
            return command, words[at:]
        command = command.commands[word]
    return command, ()

"""Every code block of README and docs runs as it stands.

The ``bash`` and ``python`` blocks of a page run in their order, in one new directory with one new
home that holds a base model and an empty database cluster. Training and validation are short, and
services listen on free ports. A ``toml`` block must parse. ``text`` is for output and formulas. A
comment before a block, ``<!-- not run: reason -->``, leaves it out; a page may have few of them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from babylon.store.embedded import EmbeddedPostgres
from babylon.training.base_model import EmbeddedModelRecipe
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs/benchmarks").glob("*.md"))
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PORTS = ("ENGINE_PORT", "ADMIN_PORT", "PREFECT_SERVER_API_PORT")
LIMIT_S = 600  # the machine may be busy


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    code: str
    reason: str | None


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(found["language"], found["code"], found["reason"])
        for found in BLOCK.finditer(page.read_text())
    ]


def script_of(blocks: list[Block]) -> str:
    """One bash script of all blocks that run; empty when there are none."""
    parts = []
    for block in blocks:
        if block.reason is not None:
            continue
        if block.language == "bash":
            parts.append(block.code)
        elif block.language == "python":
            parts.append(f"python - <<'END_OF_PROGRAM'\n{block.code}END_OF_PROGRAM\n")
    return "".join(parts)


def environment_of(home: Path) -> dict[str, str]:
    environment = {
        **os.environ,
        "BABYLON_HOME": str(home),
        "ITERATIONS": "1",
        "ARENA_SCENARIOS": "32",
        "LOCAL_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        **{name: str(free_port()) for name in PORTS},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    for name in ("DATABASE_URL", "PREFECT_API_URL"):
        environment.pop(name, None)
    return environment


@pytest.fixture(scope="module")
def prepared_home(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Path:
    """The home that every page starts with a copy of: ``initdb`` takes over a second."""
    home = tmp_path_factory.mktemp("prepared")
    shutil.copytree(embedded_model, home / "models" / EmbeddedModelRecipe().name)
    server = EmbeddedPostgres(home)
    server.acquire()
    server.release()
    return home


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in ("bash", "python", "toml", "yaml", "text"), block.code
        if block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "yaml":
            yaml.safe_load(block.code)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if script_of(blocks_of(page))], ids=lambda page: page.name
)
def test_the_commands_of_a_page_run_in_their_order(
    page: Path, tmp_path: Path, prepared_home: Path
) -> None:
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    home = shutil.copytree(prepared_home, tmp_path / ".babylon")
    script = (
        f"set -euo pipefail\ntrap 'babylon down >/dev/null 2>&1' EXIT\n{script_of(blocks_of(page))}"
    )
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment_of(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGTERM)
        output, _ = shell.communicate(timeout=60)
        pytest.fail(f"{page.name} took more than {LIMIT_S} s:\n{output[-4000:]}")
    assert shell.returncode == 0, f"{page.name} failed:\n{output[-4000:]}"


def test_the_first_program_is_the_example() -> None:
    program = (ROOT / "examples" / "first_agent.py").read_text()
    (shown,) = [b.code for b in blocks_of(ROOT / "README.md") if b.language == "python"]
    assert program.endswith(shown)

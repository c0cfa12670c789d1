"""The TypeScript client, packed by npm, installed beside a program, and run against a gateway."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.store import Store
from tests.docs.test_pages import ROOT
from tests.integration.test_serving import register, running_stack, until_healthy
from tests.tiny_policy import save_tiny_policy

CLIENT = ROOT / "clients" / "typescript"
INSTALL = ("npm", "install", "--no-audit", "--no-fund", "--no-package-lock")


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, type-checked and compiled against the packed client."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed: .ci/run installs them")
    root = tmp_path_factory.mktemp("typescript")
    package, consumer = root / "package", root / "consumer"
    left_out = shutil.ignore_patterns("node_modules", "dist")
    shutil.copytree(CLIENT, package, ignore=left_out)
    if (CLIENT / "node_modules").is_dir():
        (package / "node_modules").symlink_to(CLIENT / "node_modules")
    elif (fetched := _run(package, *INSTALL)).returncode:
        pytest.skip(f"npm cannot fetch the TypeScript compiler: {fetched.stderr[-200:]}")
    packed = _run(package, "npm", "pack", "--json")
    assert packed.returncode == 0, packed.stdout + packed.stderr
    (tarball,) = json.loads(packed.stdout[packed.stdout.index("[") :])
    assert {file["path"] for file in tarball["files"]} == {
        *("README.md", "package.json", "dist/index.js", "dist/index.d.ts")
    }
    consumer.mkdir()
    shutil.copy(CLIENT / "example" / "agent.ts", consumer)
    (consumer / "package.json").write_text('{"type": "module", "private": true}')
    installed = _run(consumer, *INSTALL, "--offline", str(package / tarball["filename"]))
    assert installed.returncode == 0, installed.stderr
    options = ("--strict", "--target", "es2022", "--module", "nodenext")
    compiled = _run(consumer, str(package / "node_modules/.bin/tsc"), *options, "agent.ts")
    assert compiled.returncode == 0, compiled.stdout
    return consumer / "agent.js"


def test_headers_name_any_agent_in_ascii(program: Path) -> None:
    (program.parent / "names.mjs").write_text(
        'import { TrajectoryPlay } from "babylon-rl";\n'
        'for (const name of ["agent 7%", "José"]) {\n'
        '  const headers = new Headers(new TrajectoryPlay(null, "t", name).headers);\n'
        '  console.log(headers.get("x-babylon-agent"));\n}'
    )
    said = _run(program.parent, "node", "names.mjs")
    assert said.stdout.splitlines() == ["agent 7%", "utf-8''Jos%C3%A9"], said.stderr


async def test_an_agent_in_typescript_needs_the_endpoint_and_a_key(
    program: Path, store: Store, settings: Settings, tmp_path: Path
) -> None:
    await register(store, [save_tiny_policy(tmp_path / "policy", seed=0)])
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        node = await asyncio.create_subprocess_exec(
            *("node", str(program), stack.url, str(local_key(settings.home.root))),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await node.communicate()
        assert node.returncode == 0, output.decode()
        row = await store.pool.fetchrow("SELECT * FROM trajectories")
        assert row is not None and row["trajectoryId"] == output.decode().strip()
        assert (row["agentId"], row["totalReward"]) == ("typescript", 3.0)
        steps = json.loads(row["stepsJson"])
        named = [call["callId"] for step in steps for call in step["llmCalls"]]
        assert named == [call["call_id"] for call in await stack.rows()]
        tone = await store.pool.fetchval("SELECT value FROM babylon.feedback WHERE name = 'tone'")
        assert tone == 0.5

"""The OpenAPI descriptions of the gateway and the admin API: schemathesis sends what they allow and
what they do not, and checks each answer. `make test-openapi` runs it."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.deployment.admin.app import admin_app
from babylon.deployment.change import checks_under
from babylon.store import Store
from babylon.store.api_keys import create_key
from tests.deployments import three_policies
from tests.integration.test_serving import on_uvicorn, register, running_stack, until_healthy
from tests.tiny_policy import save_tiny_policy

PROGRAM = os.environ.get("SCHEMATHESIS")
EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "20")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs `make test-openapi`")


async def check(url: str, key: str, directory: Path) -> None:
    """Run schemathesis on the description of a server."""
    options = [
        "--max-examples",
        EXAMPLES,
        "--request-timeout",
        "60",
        "--no-color",
        "--suppress-health-check",
        "too_slow",
    ]
    run = await asyncio.create_subprocess_exec(
        *(PROGRAM or "", "run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {key}"),
        *(*options, "--generation-deterministic"),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await run.communicate()
    print(output.decode()[-1500:])
    assert run.returncode == 0, output.decode()[-6000:]


async def test_every_answer_of_play_is_as_described(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    await register(store, [save_tiny_policy(tmp_path / "policy", seed=0)])
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        await check(stack.url, str(local_key(settings.home.root)), tmp_path)


async def test_every_answer_of_the_admin_api_is_as_described(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    await three_policies(store)
    key = str(await create_key(store, "ops", scopes=["deploy"]))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = admin_app(store, settings.home, checks_under(settings))
        async with on_uvicorn(app, listener):
            await check(url, key, tmp_path)

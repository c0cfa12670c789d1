"""The OpenAPI description of play against the gateway: schemathesis sends what it allows and what
it does not."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.store import Store
from tests.integration.test_serving import register, running_stack, until_healthy
from tests.tiny_policy import save_tiny_policy

PROGRAM = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or shutil.which(
    "schemathesis"
)


@pytest.mark.skipif(PROGRAM is None, reason="needs schemathesis: pip install schemathesis")
async def test_every_answer_is_as_described(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    await register(store, [save_tiny_policy(tmp_path / "policy", seed=0)])
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        key = f"Authorization: Bearer {local_key(settings.home.root)}"
        run = await asyncio.create_subprocess_exec(
            *(PROGRAM or "", "run", f"{stack.url}/openapi.json", "--header", key),
            *(
                "--max-examples",
                "20",
                "--request-timeout",
                "60",
                "--generation-deterministic",
                "--no-color",
            ),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await run.communicate()
    assert run.returncode == 0, output.decode()[-6000:]

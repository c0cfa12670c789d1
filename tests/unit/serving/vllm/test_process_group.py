"""Every process of the group ends with the command, and with the supervisor."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from babylon.core.processes import SUPERVISOR, lives

# A parent with a child that would outlive it; it prints both pids.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, os.environ.get("PYTHONPATH"), flush=True)
time.sleep(600)
"""

RUN = [sys.executable, "-m", "babylon.serving.vllm.process_group", sys.executable, "-c"]


@pytest.fixture
def group() -> Iterator["subprocess.Popen[str]"]:
    command = [*RUN, FAMILY]
    environment = {
        **os.environ,
        SUPERVISOR: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def processes_of(group: "subprocess.Popen[str]") -> list[psutil.Process]:
    assert group.stdout is not None
    parent, child, path = group.stdout.readline().split()
    assert path == "None"  # another environment's python: ours would lead it astray
    return [psutil.Process(int(parent)), psutil.Process(int(child))]


async def all_end(processes: list[psutil.Process]) -> None:
    async with asyncio.timeout(30):
        while any(map(lives, processes)):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("end", ["parent", "group"])
async def test_all_processes_end_with_the_command(group: "subprocess.Popen[str]", end: str) -> None:
    processes = processes_of(group)
    if end == "group":
        group.terminate()
    else:
        processes[0].kill()
    await all_end(processes)
    assert await asyncio.to_thread(group.wait) in (128 + signal.SIGKILL, 128 + signal.SIGTERM)


async def test_all_processes_end_with_the_supervisor() -> None:
    script = (
        "import os, subprocess, sys;"
        " os.environ[sys.argv[1]] = str(os.getpid());"
        " subprocess.run(sys.argv[2:])"
    )
    command = [sys.executable, "-c", script, SUPERVISOR, *RUN, FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        processes = processes_of(supervisor)
        supervisor.kill()
        await all_end(processes)


def test_exit_code_is_the_commands() -> None:
    assert subprocess.run([*RUN, "exit(7)"]).returncode == 7


def test_the_command_sees_no_secret_of_other_services_and_what_tunes_vllm() -> None:
    secrets = [
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "WANDB_API_KEY",
        "GITHUB_TOKEN",
        "SSH_AUTH_SOCK",
    ]
    kept = [
        "VLLM_API_KEY",
        "CUDA_VISIBLE_DEVICES",
        "TOKENIZERS_PARALLELISM",
        "HF_TOKEN",
        "NCCL_DEBUG",
    ]
    given = subprocess.run(
        [*RUN, "import os; print(*os.environ)"],
        env={**os.environ, **dict.fromkeys([*secrets, *kept], "0")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    assert {*kept, "PATH"} <= {*given} and not {*secrets} & {*given}

"""A real PgBouncer in front of a test's database."""

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from tests.ports import free_port

Mode = Literal["session", "transaction"]
PROGRAM = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
needs_pgbouncer = pytest.mark.skipif(
    PROGRAM is None, reason="needs PgBouncer: apt-get install pgbouncer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PgBouncer:
    """``url``: the address of the same database through the pooler. ``log``: its own."""

    url: str
    log: Path
    pid: int


@asynccontextmanager
async def pgbouncer(url: str, folder: Path, mode: Mode, size: int = 2) -> AsyncIterator[PgBouncer]:
    """Run PgBouncer with ``size`` sessions of the server, fewer than the tests' clients."""
    assert PROGRAM is not None
    parts, port = urlsplit(url), free_port()
    users, settings, log = (folder / f"pgbouncer.{end}" for end in ("txt", "ini", "log"))
    users.write_text(f'"{parts.username}" "{parts.password}"\n')
    settings.write_text(
        f"[databases]\n* = host={parts.hostname} port={parts.port}\n"
        "[pgbouncer]\nlisten_addr = 127.0.0.1\nunix_socket_dir =\n"
        f"listen_port = {port}\nauth_type = scram-sha-256\nauth_file = {users}\n"
        f"pool_mode = {mode}\ndefault_pool_size = {size}\nlogfile = {log}\n"
    )
    account = {}
    if os.geteuid() == 0:  # it refuses to run as root
        nobody = pwd.getpwnam("nobody")
        account = {"user": nobody.pw_uid, "group": nobody.pw_gid}
        log.touch()
        for file in (users, settings, log):
            os.chown(file, nobody.pw_uid, nobody.pw_gid)
        for parent in (folder, *folder.parents):
            if parent.owner() == "root" and parent != Path("/") and parent != Path("/tmp"):
                parent.chmod(parent.stat().st_mode | 0o011)
    process = subprocess.Popen(
        [PROGRAM, settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **account
    )
    try:
        await _answers(port, log)
        through = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{port}"))
        yield PgBouncer(url=through.geturl(), log=log, pid=process.pid)
    finally:
        process.kill()
        process.wait()


async def _answers(port: int, log: Path) -> None:
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            await asyncio.sleep(0.01)
    raise AssertionError(f"PgBouncer does not start: {log.read_text()}")


async def run_clients(program: str, count: int, *arguments: str) -> list[str]:
    """Run processes at the same time, because names of statements collide between processes."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, str(number), *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(count)
    ]
    outputs = [(await process.communicate())[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
    return outputs

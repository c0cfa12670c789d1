"""Machines of a test: network namespaces on one bridge, each with a disk that no other one sees.

``ip netns`` gives each its own addresses and ports; a mount namespace hides the others' folders.
"""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from babylon.store.postgres_programs import binaries
from tests.object_server import BUCKET, ENVIRONMENT, MOTO
from tests.silent_relay import relay_command, through

NETWORK = f"10.77.{1 + os.getpid() % 250}"
PREFIX = f"bab{os.getpid() % 10_000}"  # two runs on one machine do not meet
PASSWORD = "s3cret"
POSTGRES_PORT, S3_PORT, GATEWAY_PORT, ENGINE_PORT, PREFECT_PORT = 5432, 5000, 8000, 8001, 4200


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def require_namespaces() -> None:
    """Skip without the right to make network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("several machines need root and `ip`: they are network namespaces")
    name = f"{PREFIX}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"several machines need CAP_SYS_ADMIN and CAP_NET_ADMIN: {made.stderr.strip()}")
    _ip("netns", "delete", name)


@dataclass
class Machine:
    """One host: its address, its home, and the processes that it runs."""

    name: str
    number: int
    disk: Path
    others: list[Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def namespace(self) -> str:
        return f"{PREFIX}-{self.name}"

    @property
    def home(self) -> Path:
        return self.disk / f"home of {self.name}"

    def command(self, *arguments: str, user: str | None = None) -> list[str]:
        """A command line that runs on this machine and sees no other machine's disk."""
        hidden = "; ".join(f"mount -t tmpfs none '{one}'" for one in self.others)
        drop = f"setpriv --reuid={user} --clear-groups " if user else ""
        script = f'{hidden or ":"}; exec {drop}"$@"'
        return [
            *("ip", "netns", "exec", self.namespace, "unshare", "--mount"),
            *("sh", "-c", script, "sh", *arguments),
        ]

    def start(self, *arguments: str, user: str | None = None, **environment: str) -> Path:
        """Start a program that ends with the test; return its log."""
        log = self.disk / f"{len(self.running)}.log"
        with log.open("wb") as file:
            self.running.append(
                subprocess.Popen(
                    self.command(*arguments, user=user),
                    env={**os.environ, "HOME": str(self.disk), **self.environment, **environment},
                    cwd=self.disk,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
        return log

    def babylon(self, *arguments: str, **environment: str) -> Path:
        return self.start(sys.executable, "-P", "-m", "babylon", *arguments, **environment)

    def processes(self, text: str = "") -> list[psutil.Process]:
        """The machine's processes whose command line has this text."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        found = []
        for pid in listed.stdout.split():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill(self, text: str = "", number: int = signal.SIGKILL) -> int:
        """Send a signal to those processes; return their number."""
        found = self.processes(text)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return len(found)

    def cut_off(self) -> None:
        _ip("link", "set", f"{PREFIX}v{self.number}", "down")

    def rejoin(self) -> None:
        _ip("link", "set", f"{PREFIX}v{self.number}", "up")

    def slow_down(self, rate: str) -> None:
        """Bound what the machine receives. Without ``rate``, end that."""
        device = f"{PREFIX}v{self.number}"
        bound = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        action = (
            ("replace", "dev", device, "root", *bound) if rate else ("del", "dev", device, "root")
        )
        subprocess.run(["tc", "qdisc", *action], check=True, capture_output=True, text=True)

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        files = [*self.disk.glob("*.log"), *self.home.glob("logs/*.log")]
        return "\n".join(
            f"--- {self.name}: {file.name}\n"
            + "\n".join(file.read_text(errors="replace").splitlines()[-25:])
            for file in files
        )


@contextmanager
def machines(directory: Path, *names: str) -> Iterator[dict[str, Machine]]:
    """Make a bridge and a machine for each name; the test itself has the address ``.1``."""
    require_namespaces()
    directory.chmod(0o755)
    disks = {name: directory / name for name in names}
    for disk in disks.values():
        disk.mkdir()
    made = {
        name: Machine(name, number, disks[name], [d for n, d in disks.items() if n != name])
        for number, name in enumerate(names, start=2)
    }
    bridge = f"{PREFIX}br"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{NETWORK}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for one in made.values():
            outer, inner = f"{PREFIX}v{one.number}", "eth0"
            _ip("netns", "add", one.namespace)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", one.namespace)
            _ip("link", "set", outer, "master", bridge, "up")
            for setting in (("link", "set", "lo", "up"), ("link", "set", inner, "up")):
                _ip("-n", one.namespace, *setting)
            _ip("-n", one.namespace, "address", "add", f"{one.address}/24", "dev", inner)
        yield made
    finally:
        for one in made.values():
            with suppress(subprocess.CalledProcessError):
                one.kill()
            for process in one.running:
                process.kill()
                process.wait()
            # first: the kernel takes a namespace down later, and the next test needs the name
            subprocess.run(["ip", "link", "delete", f"{PREFIX}v{one.number}"], capture_output=True)
            subprocess.run(["ip", "netns", "delete", one.namespace], capture_output=True)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)


def start_postgres(machine: Machine) -> str:
    """Start a Postgres for the whole network; return its URL."""
    nobody = pwd.getpwnam("nobody")
    data = machine.disk / "postgres"
    data.mkdir()
    (machine.disk / "password").write_text(PASSWORD)
    for path in (machine.disk, data, machine.disk / "password"):
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    programs = {"LC_ALL": "C"}
    made = subprocess.run(
        machine.command(
            *(str(binaries() / "initdb"), "-D", str(data), "-U", "babylon", "--no-locale", "-N"),
            *("--encoding=UTF8", "--auth=scram-sha-256", f"--pwfile={machine.disk / 'password'}"),
            user="nobody",
        ),
        env={**os.environ, **programs},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write(f"host all all {NETWORK}.0/24 scram-sha-256\n")
    options = {"listen_addresses": machine.address, "port": POSTGRES_PORT, "fsync": "off"}
    options |= {"unix_socket_directories": "", "max_connections": 200}
    settings = [part for n, v in options.items() for part in ("-c", f"{n}={v}")]
    machine.start(str(binaries() / "postgres"), "-D", str(data), *settings, user="nobody")
    pid = data / "postmaster.pid"
    for _ in range(1200):
        if pid.exists() and "ready" in pid.read_text():
            return f"postgresql://babylon:{PASSWORD}@{machine.address}:{POSTGRES_PORT}/postgres"
        assert machine.running[-1].poll() is None, machine.logs()
        time.sleep(0.1)
    raise AssertionError(machine.logs())


def start_relay(machine: Machine, url: str) -> str:
    """Start a relay to Postgres that signals delay and reset; return the URL through it."""
    log = machine.start(*relay_command(url, machine.address, POSTGRES_PORT))
    for _ in range(600):
        if log.read_text().startswith(str(POSTGRES_PORT)):
            return through(url, machine.address, POSTGRES_PORT)
        assert machine.running[-1].poll() is None, machine.logs()
        time.sleep(0.1)
    raise AssertionError(machine.logs())


def start_object_store(machine: Machine) -> dict[str, str]:
    """Start an S3 API for the whole network; return the variables with which it is used."""
    if subprocess.run([MOTO, "-c", "import moto.server"], capture_output=True).returncode:
        pytest.skip(
            "moto is not installed: pip install 'moto[s3]' flask flask-cors, or set TEST_MOTO"
        )
    machine.start(
        MOTO, "-m", "moto.server", "-H", machine.address, "-p", str(S3_PORT), PYTHONPATH=""
    )
    url = f"http://{machine.address}:{S3_PORT}"
    _until_made(url, machine)
    return {**ENVIRONMENT, "AWS_ENDPOINT_URL": url, "ARTIFACT_STORE": f"s3://{BUCKET}/babylon"}


def _until_made(url: str, machine: Machine) -> None:
    import urllib.request

    for _ in range(1200):
        with suppress(OSError):
            request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            return
        time.sleep(0.1)
    raise AssertionError(machine.logs())


def copy_key(source: Machine, targets: Sequence[Machine]) -> None:
    """Give other machines the secret of an engine's home, as an operator does."""
    for target in targets:
        target.home.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.home / "engine.key", target.home / "engine.key")

"""The machines of an update. The first one runs it, and the others lend their processes.

All reach one address, at which torchrun's processes on the first machine meet the others. The
job comes from there too; checkpoints and progress come from the object store.
"""

import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from babylon.core.errors import ArtifactError, ConfigError
from babylon.core.home import Home
from babylon.core.objects import fetch
from babylon.policies.shared_files import fetch_checkpoints
from babylon.training.processes.job import UpdateJob


@dataclass(frozen=True, slots=True)
class Nodes:
    """``count`` machines that meet at ``host:port`` of the first one. This is number ``number``."""

    count: int = 1
    meeting: str = ""
    number: int = 0

    def arguments(self) -> list[str]:
        """The command-line arguments of the launcher."""
        return [str(self.count), self.meeting, str(self.number)]

    def interface(self) -> str:
        """The network interface that leads to the first machine.

        Raises:
            ConfigError: none does.
        """
        if self.count == 1:
            return "lo"  # the name of a machine need not resolve
        host, _, port = self.meeting.rpartition(":")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, int(port)))  # sends nothing
                own = probe.getsockname()[0]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"TRAIN_RENDEZVOUS={self.meeting!r} cannot be reached ({error}): name host and port"
                " of the machine whose worker runs the update"
            ) from error
        found = psutil.net_if_addrs().items()
        return str(next(name for name, listed in found if own in [one.address for one in listed]))


ALONE = Nodes()


def in_home(job: UpdateJob, home: Home) -> UpdateJob:
    """The job with the paths of another machine's home."""
    first = job.home
    if first is None:
        return job

    def here(path: str | Path) -> Path:
        own = Path(path)
        inside = own.is_absolute() and own.is_relative_to(first.root)
        return home.root / own.relative_to(first.root) if inside else own

    progress = job.progress_directory
    return replace(
        job,
        parent=str(here(job.parent)),
        target=here(job.target),
        optimizer=job.optimizer and str(here(job.optimizer)),
        progress_directory=progress and here(progress),
        home=home,
    )


def bring_files(job: UpdateJob) -> None:
    """Fetch what a job reads from the object store.

    Raises:
        ArtifactError: the store lacks a checkpoint, or does not answer.
    """
    if job.home is None:
        return
    optimizer = [job.optimizer] if job.optimizer else []
    fetch_checkpoints(job.home, job.parent, *optimizer)
    if job.progress_directory:
        with suppress(ArtifactError):  # nothing was saved yet; the ranks compare what they have
            fetch(job.home, job.progress_directory)

"""The home: the directory that holds everything mutable. Two homes are two independent systems."""

import os
from dataclasses import dataclass
from pathlib import Path

from babylon.core.errors import StorageError


@dataclass(frozen=True, slots=True)
class Home:
    """Absolute path of a home, and the directories below it."""

    root: Path

    @classmethod
    def at(cls, path: "str | Path | Home") -> "Home":
        return path if isinstance(path, Home) else cls(Path(os.path.abspath(path)))

    @property
    def settings_file(self) -> Path:
        return self.root / "babylon.toml"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def arena(self) -> Path:
        return self.root / "arena"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def progress(self) -> Path:
        return self.checkpoints / "progress"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def recording(self) -> Path:
        return self.root / "recording"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def make_directory(path: Path) -> None:
    """Make ``path`` and its missing parents.

    Raises:
        StorageError: The directory cannot be made. Only this function knows that this is the
            reason: elsewhere "no such file" is a bug.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the directory {path} ({error.strerror}): free disk space, or set"
            " BABYLON_HOME to a writable directory"
        ) from error

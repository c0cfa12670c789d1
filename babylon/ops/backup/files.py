"""Copies of a home's files, each with its digest. All functions block."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from babylon.core.errors import StorageError
from babylon.core.home import Home
from babylon.core.objects import copy_stored, publish

RECORDING = "recording"
# Files that are written once and then only read, and the two files of settings. Logs, process ids
# and Postgres' own files stay behind; the progress of an update does too, it begins again.
IMMUTABLE = ("models", "checkpoints", "artifacts", "datasets", "arena")
SINGLE = ("babylon.toml", "local.key")
_DIRECTORIES = ("models", "checkpoints", "arena")  # each holds directories that appear whole
_PROGRESS = os.path.join("checkpoints", "progress")
_CHUNK = 2**20


def copy_files(root: Path, target: Path, names: Iterable[str]) -> dict[str, str]:
    """Copy files and directories of ``root`` → path in ``root`` → SHA-256.

    A file that disappears meanwhile is left out: no row of the database names it.
    """
    digests = {}
    for relative in (path for name in names for path in _below(root, name)):
        place = target / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            digests[relative] = _copy(root / relative, place)
        except FileNotFoundError:
            continue
    return digests


def copy_stored_files(home: Home, target: Path, digests: dict[str, str]) -> dict[str, str]:
    """Copy what only the object store holds, as ``copy_files``. ``digests``: of what is there.

    Raises:
        ArtifactError: the store does not answer.
    """
    for name in IMMUTABLE:
        copy_stored(home, home.root / name, target)
    shutil.rmtree(target / _PROGRESS, ignore_errors=True)
    paths = {relative for name in IMMUTABLE for relative in _below(target, name)}
    return {path: sha256(target / path) for path in paths - digests.keys()}


def publish_files(home: Home) -> None:
    """Copy the files of a restored home into its object store, for the other machines.

    Raises:
        StorageError: the store does not take them.
    """
    for name in _DIRECTORIES:
        for path in sorted((home.root / name).glob("*")):
            publish(home, path)
    for path in sorted((home.root / "artifacts").rglob("*")):
        if path.is_file():
            publish(home, path)


def check_files(root: Path, digests: Mapping[str, str]) -> None:
    """Check every file of a backup.

    Raises:
        StorageError: a file is missing, or its content has changed.
    """
    for relative, expected in digests.items():
        path = root / relative
        if not path.resolve().is_relative_to(root.resolve()):
            raise StorageError(f"the backup names a file outside of it: {relative}")
        if not path.is_file():
            raise StorageError(f"the backup is damaged: {path} is missing: use another backup")
        found = sha256(path)
        if found != expected:
            raise StorageError(
                f"the backup is damaged: {path} has sha256 {found[:16]}…, expected"
                f" {expected[:16]}…: use another backup"
            )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _below(root: Path, name: str) -> Iterator[str]:
    """Paths of finished files: hidden ones and directories are unfinished."""
    if (root / name).is_file():
        yield name
    for directory, inside, files in os.walk(root / name, followlinks=True):
        relative = os.path.relpath(directory, root)
        inside[:] = [
            one
            for one in inside
            if not one.startswith(".") and os.path.join(relative, one) != _PROGRESS
        ]
        for file in files:
            if not file.startswith("."):
                yield os.path.join(relative, file)


def _copy(source: Path, target: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("xb") as written:
        while data := read.read(_CHUNK):
            digest.update(data)
            written.write(data)
        written.flush()
        os.fsync(written.fileno())
    shutil.copystat(source, target)
    return digest.hexdigest()

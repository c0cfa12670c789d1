"""The home: the directory that holds everything mutable. Two homes are two independent systems."""

import os
import pwd
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import url2pathname

from babylon.core.errors import StorageError

_HERE, _FILE = "home:", "file://"


@dataclass(frozen=True, slots=True)
class Home:
    """Absolute path of a home, and the directories below it.

    ``store``: URI of the object store that holds its files for other machines, empty for none.
    ``cache_gb``: bound of the copies kept here (``babylon.core.objects``).
    """

    root: Path
    store: str = ""
    cache_gb: float = 100.0

    @classmethod
    def at(cls, path: "str | Path | Home") -> "Home":
        return path if isinstance(path, Home) else cls(Path(os.path.abspath(path)))

    def reference(self, path: str | Path) -> str:
        """Return the name under which the database and manifests keep a file or directory.

        ``home:checkpoints/…`` for an absolute path below the home, so that the home can move. Any
        other path, and an id of the Hugging Face hub, stays as it is.
        """
        if not os.path.isabs(path):
            return str(path)
        for root, inside in ((str(self.root), str(path)), map(os.path.realpath, (self.root, path))):
            if inside.startswith(root + os.sep):
                return _HERE + Path(inside).relative_to(root).as_posix()
        return str(path)

    def resolve(self, reference: str) -> str:
        """Return the local path of a reference, or an id of the Hugging Face hub as it is.

        This is the only place that knows where a reference leads.

        Raises:
            StorageError: the reference has another scheme, such as ``s3:``.
        """
        if reference.startswith(_HERE):
            return str(self.root / reference.removeprefix(_HERE))
        if reference.startswith(_FILE):
            return url2pathname(reference.removeprefix(_FILE))
        if "://" in reference:
            raise StorageError(f"{reference}: only files of this machine can be read")
        return reference

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
    def baselines(self) -> Path:
        return self.root / "baselines"

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

    @property
    def scratch(self) -> Path:
        """Temporary files of the runs on this machine."""
        return self.root / "tmp"

    @property
    def wandb(self) -> Path:
        """Files of Weights & Biases: the runs of the mode ``offline``, and its caches."""
        return self.root / "wandb"


def make_home(root: Path) -> None:
    """Make a home for its owner alone, because it holds prompts and ground truth.

    One that exists keeps its mode: its operator may share it with a group. What first writes to a
    home calls this, or its directory would be made as the parent of another, for all to read.

    Raises:
        StorageError: the directory cannot be made.
    """
    if root.is_dir():
        return
    make_directory(root, 0o700)
    if os.geteuid() == 0:
        # The embedded Postgres is never root and enters the home. It says itself if it cannot.
        with suppress(KeyError, OSError):
            os.chown(root, -1, server_account(root).pw_gid)
            root.chmod(0o710)


def server_account(home: Path) -> pwd.struct_passwd:
    """Return the user that runs an embedded Postgres: the present one, but never root."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    for path in (home, *home.parents):
        if uid := path.stat().st_uid:
            try:
                return pwd.getpwuid(uid)
            except KeyError:  # the owner of a mounted volume has no name; Postgres needs one
                break
    return pwd.getpwnam("nobody")


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make ``path``, with ``mode`` less the umask, and its missing parents.

    Raises:
        StorageError: The directory cannot be made. Only this function knows that this is the
            reason: elsewhere "no such file" is a bug.
    """
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        remedy = "a file lies there: move it away" if in_the_way else "free disk space"
        raise StorageError(
            f"cannot make the directory {path} ({error.strerror}): {remedy}, or set"
            " BABYLON_HOME to a writable directory"
        ) from error


def remove_untouched(directory: Path, before: float) -> int:
    """Delete the files below ``directory`` whose last change, of content or name, is older.

    Directories that are empty and as old go too. ``before`` is in seconds since 1970. Returns the
    number of deleted files. Sockets, links and the directory itself stay.
    """
    found = []
    for place, _, names in os.walk(directory):
        with suppress(FileNotFoundError):  # another process removes the same
            found.append((Path(place), names, os.stat(place).st_mtime))
    removed = 0
    for parent, names, touched in reversed(found):
        for path in (parent / name for name in names):
            with suppress(FileNotFoundError):
                # Not the time of the content: files unpacked from an archive bring an old one.
                if stat.S_ISREG((known := path.lstat()).st_mode) and known.st_ctime < before:
                    path.unlink()
                    removed += 1
        if touched < before and parent != directory:
            with suppress(OSError):  # it is not empty
                parent.rmdir()
    return removed

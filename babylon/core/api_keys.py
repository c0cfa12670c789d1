"""API keys: 256 random bits behind a public id, of which only a hash is kept.

``sk-babylon-<id>-<secret>``. The hash is plain SHA-256: nobody guesses 256 random bits, so there
is nothing that a slow hash would protect. The local key lets the programs of one home call its
gateway; it lies in a file of that home, which only its owner can read, and in no database.
"""

import os
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.home import make_directory

SCOPES = ("infer", "deploy", "read")
LOCAL = "local"
_PREFIX = "sk-babylon-"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as its holder has it."""

    key_id: str
    secret: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.key_id}-{self.secret}"

    @property
    def digest(self) -> bytes:
        """``[32]`` bytes, all that is stored of the secret."""
        return sha256(self.secret.encode()).digest()


def new_key(key_id: str | None = None) -> ApiKey:
    """A key that nobody has yet."""
    return ApiKey(key_id or secrets.token_hex(6), secrets.token_urlsafe(32))


def parse_key(text: str) -> ApiKey | None:
    """What was sent as a key, or ``None`` where it is none of ours."""
    key_id, found, secret = text.removeprefix(_PREFIX).partition("-")
    return ApiKey(key_id, secret) if found and text.startswith(_PREFIX) else None


def local_key(home: Path) -> ApiKey:
    """The key of the home's own programs, made by whoever needs it first.

    Raises:
        ConfigError: the file holds something else.
        StorageError: the home cannot be made.
    """
    path = local_key_path(home)
    if not path.exists():
        _write_once(path, f"{new_key(LOCAL)}\n")
    key = parse_key(path.read_text().strip())
    if key is None or key.key_id != LOCAL:
        raise ConfigError(f"{path} holds no key of ours: delete it, a new one will be made")
    return key


def local_key_path(home: Path) -> Path:
    return home / "local.key"


def _write_once(path: Path, text: str) -> None:
    """The first writer wins, and no reader sees half a file."""
    make_directory(path.parent)
    part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.link(part, path)
    except FileExistsError:
        return
    finally:
        part.unlink()

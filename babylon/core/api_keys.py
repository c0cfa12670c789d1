"""API keys ``sk-babylon-<id>-<secret>``: a public id and 256 random bits.

Only the secret's SHA-256 is stored. A slow hash is not needed, because 256 random bits cannot be
guessed. The local key lets the programs of one home call its gateway. It is in a file that only the
home's owner can read, and in no database.
"""

import os
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from babylon.core.errors import ConfigError
from babylon.core.home import make_home

SCOPES = ("infer", "record", "read", "deploy")
LOCAL = "local"
MATCH_KEY = "match"
_PREFIX = "sk-babylon-"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key with its secret."""

    key_id: str
    secret: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.key_id}-{self.secret}"

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret, ``[32]`` bytes."""
        return sha256(self.secret.encode()).digest()


def new_key(key_id: str | None = None) -> ApiKey:
    """Make a random key."""
    return ApiKey(key_id or secrets.token_hex(6), secrets.token_urlsafe(32))


def parse_key(text: str) -> ApiKey | None:
    """Parse a key; return ``None`` if it is not one of ours."""
    key_id, found, secret = text.removeprefix(_PREFIX).partition("-")
    return ApiKey(key_id, secret) if found and text.startswith(_PREFIX) else None


def match_key(probe_key: str) -> ApiKey:
    """Return a gateway's key for the calls of whole games, which it does not record."""
    known = parse_key(probe_key)
    assert known is not None  # the gateway made it
    return ApiKey(MATCH_KEY, known.secret)


def local_key(home: Path) -> ApiKey:
    """Return the home's local key; make it at the first call.

    Raises:
        ConfigError: the file does not hold a local key.
        StorageError: the home directory cannot be made.
    """
    path = local_key_path(home)
    if not path.exists():
        _write_once(path, f"{new_key(LOCAL)}\n")
    key = parse_key(path.read_text().strip())
    if key is None or key.key_id != LOCAL:
        raise ConfigError(f"{path} holds no babylon key: delete it, and a new one will be made")
    return key


def local_key_path(home: Path) -> Path:
    """Return the file of the home's local key."""
    return home / "local.key"


def engine_secret(home: Path) -> str:
    """Return the secret that loads and unloads policies; make it at the first call.

    Raises:
        ConfigError: the file is empty.
        StorageError: the home directory cannot be made.
    """
    path = home / "engine.key"
    if not path.exists():
        _write_once(path, f"{secrets.token_urlsafe(32)}\n")
    return _secret(path)


def prefect_auth_path(home: Path) -> Path:
    """Return the file with ``user:password`` of the Prefect server that ``babylon up`` starts."""
    return home / "prefect.key"


def make_prefect_auth(home: Path) -> None:
    """Write a random password for that server unless there is one.

    Raises:
        ConfigError: the file is empty.
        StorageError: the home directory cannot be made.
    """
    path = prefect_auth_path(home)
    _write_once(path, f"babylon:{secrets.token_urlsafe(32)}\n")
    _secret(path)


def _secret(path: Path) -> str:
    """Read a secret. An empty one would let every user of the machine in."""
    if secret := path.read_text().strip():
        return secret
    raise ConfigError(f"{path} is empty: delete it, and a new one will be made")


def _write_once(path: Path, text: str) -> None:
    """Write a file unless it exists. Readers never see a partial file."""
    make_home(path.parent)
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

"""The settings and the version that the services were started with, and the supervisor's problem.

Services also inherit the environment, and the libraries in them read it: a change of such a
variable is a change of the settings. Only a hash of each value is kept, in a file that only the
owner can read: values may be secrets.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

import babylon
from babylon.core.home import Home, make_directory

Variables = Mapping[str, str]  # ``Settings.environment``
VERSION = "the version of babylon"  # stands among the variables: services of another one are old
_OF_LIBRARIES = ("AWS_", "CUDA_", "HF_", "OTEL_", "PREFECT_", "VLLM_", "WANDB_")


def write_in_force(home: Home, variables: Variables) -> None:
    """Record the settings of services that all answer."""
    path = in_force_path(home)
    make_directory(path.parent)
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(_hashes(variables)))
    part.replace(path)  # `up`, which waits for it, never sees a partial record


def forget_in_force(home: Home) -> None:
    """Remove the record before services start or after they stopped."""
    in_force_path(home).unlink(missing_ok=True)


def written_at(home: Home) -> int | None:
    """Return the time of the last write in nanoseconds; ``None`` without a record."""
    with suppress(FileNotFoundError):  # the supervisor may remove it meanwhile
        return in_force_path(home).stat().st_mtime_ns
    return None


def note_problem(home: Home, problem: str | None) -> None:
    """Keep the supervisor's present problem for ``babylon status``; ``None`` if there is none."""
    path = home.root / "run" / "problem"
    with suppress(OSError):  # the disk may be full; the log has it too
        path.unlink(missing_ok=True) if problem is None else path.write_text(problem)


def read_problem(home: Home) -> str | None:
    with suppress(FileNotFoundError):  # the supervisor may have solved it meanwhile
        return (home.root / "run" / "problem").read_text()
    return None


def changed_settings(home: Home, variables: Variables) -> list[str] | None:
    """Return the variables whose values are not in force; ``None`` while services start.

    A record that a loss of power emptied is as none: no service runs any more.
    """
    path = in_force_path(home)
    try:
        in_force = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    now = _hashes(variables)
    return sorted(name for name in {*in_force, *now} if in_force.get(name) != now.get(name))


def _hashes(variables: Variables) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in os.environ if name.startswith(_OF_LIBRARIES)}
    pairs = {**inherited, **variables, VERSION: babylon.__version__}.items()
    return {name: sha256(f"{name}={value}".encode()).hexdigest() for name, value in pairs}


def in_force_path(home: Home) -> Path:
    return home.root / "run" / "settings.hashes"

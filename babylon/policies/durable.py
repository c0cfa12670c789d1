"""Durable writes: they survive a power cut, and report a full disk as an ``OSError``."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Context that writes this file or directory, and removes it if the body fails.

    Part of a checkpoint would otherwise keep a full disk full.

    Raises:
        OSError: the system's error, in place of the errors that torch and safetensors make of it.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        nameless = isinstance(error, OSError) and error.filename is None
        known = isinstance(error, RuntimeError | SafetensorError) or nameless
        if known and (number := _errno(error)):
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def save_tensors(state: object, path: Path) -> None:
    """``torch.save`` through a Python file, because torch's own loses the cause of an error."""
    with open(path, "wb") as file:
        torch.save(state, file)


def _errno(error: BaseException) -> int | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.errno
        if isinstance(cause, SafetensorError) and (
            match := re.search(r"os error (\d+)", str(cause))
        ):
            return int(match[1])
        cause = cause.__context__
    return None

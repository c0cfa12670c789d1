"""Numeric policies on disk: a torch program from features to scores, and what it was made for.

The program is exported (``torch.export``), so nothing of the library that trained it is needed to
run it. A directory holds ``numeric.json`` and ``policy.pt2``.
"""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from babylon.core.errors import ModelError
from babylon.core.numeric_manifest import MANIFEST, PROGRAM, NumericManifest, read_manifest

Scores = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericPolicy:
    """A loaded policy. ``scores``: features [B, F] → scores of a menu, or dials [B, A]."""

    manifest: NumericManifest
    scores: Scores


def save_numeric(directory: Path, module: torch.nn.Module, manifest: NumericManifest) -> None:
    """Export a module from features [B, F] to scores [B, A], with any B."""
    directory.mkdir(parents=True, exist_ok=True)
    example = torch.zeros(2, len(manifest.features))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its exporter
        program = torch.export.export(
            module.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("batch", max=65536)},)
        )
        torch.export.save(program, directory / PROGRAM)
    digest = hashlib.sha256((directory / PROGRAM).read_bytes()).hexdigest()
    manifest = msgspec.structs.replace(manifest, digest=digest)
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def load_numeric(directory: Path) -> NumericPolicy:
    """Load an exported policy.

    Raises:
        ModelError: A file is missing, damaged or of another format.
    """
    manifest = read_manifest(directory)
    path = directory / PROGRAM
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.digest:
            raise ModelError(f"{path} is not the program of its {MANIFEST}: export it again")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: Any = torch.export.load(path).module()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path} does not load ({error}): export it again") from error

    def scores(features: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.no_grad():
            found: NDArray[np.float32] = module(torch.from_numpy(features)).numpy()
        return found

    return NumericPolicy(manifest=manifest, scores=scores)

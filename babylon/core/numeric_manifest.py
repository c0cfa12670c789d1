"""The manifest of a numeric policy: what it was made for, and how it was trained."""

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from babylon.core.errors import ModelError

MANIFEST, PROGRAM = "numeric.json", "policy.pt2"
FORMAT = 1
Coding: TypeAlias = Literal["menu", "dials"]


class NumericManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``coding`` and ``features`` are those of ``babylon.game.envs`` for these sizes.

    ``pnl``: mean P&L in the worlds by which the elite was chosen, simulator dollars a world.
    """

    algorithm: str
    coding: Coding
    questions: int
    perps: int
    features: tuple[str, ...]
    rules: str
    steps: int
    seed: int
    pnl: float
    digest: str = ""  # of the program
    format: int = FORMAT

    def fits(self, questions: int, perps: int) -> bool:
        """Return whether the policy can play a game of this size."""
        return (self.questions, self.perps) == (questions, perps)


def is_numeric(path: str | Path) -> bool:
    """Return whether a directory holds an exported numeric policy."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(directory: Path) -> NumericManifest:
    """Read the manifest of an exported policy.

    Raises:
        ModelError: It is damaged or of another format.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=NumericManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} is not a numeric policy's ({error}): export it again") from error
    if manifest.format != FORMAT:
        raise ModelError(f"{path} has format {manifest.format}, not {FORMAT}: export it again")
    return manifest

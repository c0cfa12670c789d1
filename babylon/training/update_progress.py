"""An update's progress on disk: killed and started again, it goes on where it was saved.

One file holds the tuned weights, the optimiser with its warm-up, the trainer's record and the
position in the data, and a digest of everything that decides the update. The order of the data
follows from seed and iteration and nothing else draws random numbers, so there is no generator to
save. The file is replaced at once, or not at all.

It is written after a train step, as soon as training has lasted twenty times as long as writing
it took: so it costs at most a twentieth of the time, and a crash at most twenty times what it
would have cost to save more often, whether the model is tiny or has billions of weights.
"""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch

from babylon.core.failpoints import failpoint
from babylon.core.trajectories import TrainingRow
from babylon.policies.durable import save_tensors, sync, written
from babylon.training.trainable import Trainable

logger = logging.getLogger(__name__)
PATIENCE = 20  # times the duration of the last save
FORMAT = 1  # of the file; another one is not read
_FILE = "progress.pt"


def update_digest(rows: Sequence[TrainingRow], decides: Mapping[str, object]) -> str:
    """Names an update by all that its result depends on: another digest is another update."""
    digest = hashlib.sha256(msgspec.json.encode(rows))
    for name, value in sorted(decides.items()):
        digest.update(f"\n{name}={value!r}".encode())
    return f"{FORMAT}-{digest.hexdigest()}"


class ProgressDirectory:
    """The trainer's journal in a directory of its own; ``remove`` it when the update is saved."""

    def __init__(self, directory: Path, digest: str, trainable: Trainable) -> None:
        self._directory, self._digest, self._trainable = directory, digest, trainable
        self._took, self._ended = 0.0, time.monotonic()

    def restore(self) -> dict[str, Any] | None:
        """Put weights and optimiser back; None when there is nothing, or another update's."""
        path = self._directory / _FILE
        if not path.exists():
            return None
        try:
            saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            # only a shortcut: an update that could never be tried again would be worse
            logger.warning("%s cannot be read, the update starts anew: %s", path, error)
            return None
        if saved.get("digest") != self._digest:
            logger.info("%s is of another update: it is ignored", path)
            return None
        with torch.no_grad():
            for name, parameter in self._trainable.tuned.items():
                parameter.copy_(saved["weights"][name])
        self._trainable.optimizer.load_state_dict(saved["optimizer"])
        record: dict[str, Any] = saved["record"]
        logger.info(
            "the update goes on from %s: iteration %d, after %d of its train steps",
            path,
            record["iteration"],
            record["step"],
        )
        return record

    def save(self, state: dict[str, Any]) -> None:
        """Keep everything, unless that was done a moment ago."""
        started = time.monotonic()
        if started - self._ended < PATIENCE * self._took:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        failpoint("progress.before")
        temporary = self._directory / f"{_FILE}.{os.getpid()}"
        saved = {
            "digest": self._digest,
            "weights": {name: p.detach() for name, p in self._trainable.tuned.items()},
            "optimizer": self._trainable.optimizer.state_dict(),
            "record": state,
        }
        with written(temporary):
            save_tensors(saved, temporary)
            sync(temporary)
        failpoint("progress.written")
        os.replace(temporary, self._directory / _FILE)
        sync(self._directory)
        failpoint("progress.after")
        self._ended = time.monotonic()
        self._took = self._ended - started

    def remove(self) -> None:
        """The update is saved as a checkpoint, or came to nothing."""
        failpoint("progress.forget")
        shutil.rmtree(self._directory, ignore_errors=True)
        failpoint("progress.forgotten")

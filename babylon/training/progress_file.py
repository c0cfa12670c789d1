"""An update's progress on disk: an update that was killed resumes from the last save.

One file holds the tuned weights, the optimiser with its warm-up, the trainer's record with the
position in the data, and a digest of the update's inputs. Seed and iteration determine the order
of the data, and nothing else draws random numbers, so no generator is saved. The file is replaced
atomically.

A save happens after a train step, once training has lasted ``PATIENCE`` times as long as the last
save took. Saving therefore costs at most a twentieth of the time, for models of any size.
"""

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from babylon.core.errors import BabylonError
from babylon.core.failpoints import failpoint
from babylon.core.home import Home, sync
from babylon.core.objects import publish
from babylon.core.trajectories import TrainingRow
from babylon.policies.durable import save_tensors, written
from babylon.training.damaged import damage_logged
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.diagnostics import RecordState
from babylon.training.grpo.kept_state import Kept
from babylon.training.grpo.ranks import ALONE, Ranks
from babylon.training.grpo.shards import Change, collected, divided, local, with_states
from babylon.training.progress_directory import PROGRESS_FILE, forget_progress
from babylon.training.trainable import Trainable

logger = logging.getLogger(__name__)
PATIENCE = 20  # train this many times as long as the last save took
FORMAT = 3  # files of another format are ignored


def update_digest(rows: Sequence[TrainingRow], decides: Mapping[str, object]) -> str:
    """Digest of an update's inputs. Equal digests mean equal results, up to rounding."""
    digest = hashlib.sha256(msgspec.json.encode(rows))
    for name, value in sorted(decides.items()):
        digest.update(f"\n{name}={_typed(value)!r}".encode())
    return f"{FORMAT}-{digest.hexdigest()}"


def _typed(value: object) -> object:
    """Options with floats where floats are declared. Ranks read them from JSON, 32 as 32.0.

    Those that only cut the work are left out: who lowers one for lack of memory can resume.
    """
    if isinstance(value, TrainerConfig):
        value = replace(value, max_tokens=None, activation_checkpointing=False)
    if is_dataclass(value) and not isinstance(value, type):
        return msgspec.convert(asdict(value), type(value))
    return value


def place_of(checkpoint: Path | str) -> str:
    """Return the last two names of a path: in another home the same checkpoint has the same."""
    return "/".join(Path(checkpoint).parts[-2:])


class ProgressFile:
    """The trainer's ``Journal`` on disk, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        digest: str,
        trainable: Trainable,
        home: Home | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._directory, self._digest, self._trainable = directory, digest, trainable
        self._home, self._ranks = home, ranks
        self._took, self._ended = 0.0, time.monotonic()

    def restore(self) -> RecordState | None:
        """Restore weights and optimiser, and return the trainer's record.

        Return None if nothing was saved, or if the file belongs to another update.
        """
        saved = self._read()
        # Ranks of other machines read another copy. A save may not have reached them.
        at = 1 + 10**6 * saved["record"]["iteration"] + saved["record"]["step"] if saved else 0
        if self._ranks.most(at) != -self._ranks.most(-at):
            logger.warning("the machines have saved different steps: the update starts over")
            return None
        if saved is None:
            return None
        record: RecordState = self._divided(saved)
        logger.info(
            "the update resumes from %s: iteration %d, after %d of its train steps",
            self._directory / PROGRESS_FILE,
            record["iteration"],
            record["step"],
        )
        return record

    def _read(self) -> dict[str, Any] | None:
        path = self._directory / PROGRESS_FILE
        if not path.exists():
            return None
        saved: dict[str, Any] | None = None
        with damage_logged(path, "the update starts over"):  # else every retry would fail
            saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved and saved.get("digest") != self._digest:
            logger.info("%s belongs to another update and is ignored", path)
            return None
        return saved

    def save(self, state: RecordState) -> None:
        """Save weights, optimiser and ``state``, unless the last save is too recent.

        The first rank decides and writes whole tensors, so any number of ranks can resume from
        them. All ranks call this together, because each may hold a part.
        """
        started = time.monotonic()
        due = self._ranks.rank == 0 and started - self._ended >= PATIENCE * self._took
        if not self._ranks.most(int(due)):
            return
        whole = self._whole(state)
        if self._ranks.rank:
            return
        try:
            self._write(whole)
        except OSError as error:  # a full disk: the update needs no journal unless it is killed
            logger.warning("the progress is not saved, a killed update would start over: %s", error)
        self._ended = time.monotonic()
        self._took = self._ended - started

    def _whole(self, record: RecordState) -> dict[str, Any]:
        """Return the contents of the file. The first rank gets tensors that are divided."""
        tuned, optimizer = self._trainable.tuned, self._trainable.optimizer
        gather = partial(collected, first=self._ranks.rank == 0)
        parameters = list(tuned.values())
        return {
            "digest": self._digest,
            "weights": {name: gather(p.detach(), p) for name, p in tuned.items()},
            "optimizer": with_states(optimizer.state_dict(), parameters, gather),
            "record": _changed(record, parameters, gather),
        }

    def _divided(self, saved: dict[str, Any]) -> RecordState:
        """Put a saved state into force, and return its record. A rank takes its part of both."""
        tuned, record = self._trainable.tuned, saved["record"]
        with torch.no_grad():
            for name, parameter in tuned.items():
                local(parameter).copy_(local(divided(saved["weights"][name], parameter)))
        parameters = list(tuned.values())
        moments = with_states(saved["optimizer"], parameters, divided)
        self._trainable.optimizer.load_state_dict(moments)
        return _changed(record, parameters, _part)

    def _write(self, saved: dict[str, Any]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        failpoint("progress.before")
        temporary = self._directory / f"{PROGRESS_FILE}.{os.getpid()}"
        with written(temporary):
            save_tensors(saved, temporary)
            sync(temporary)
        failpoint("progress.written")
        os.replace(temporary, self._directory / PROGRESS_FILE)
        sync(self._directory)
        self._share()
        failpoint("progress.after")

    def remove(self) -> None:
        """Delete the directory: the update leads nowhere."""
        if not self._ranks.rank:
            forget_progress(self._home, self._directory)

    def _share(self) -> None:
        """Copy the progress into the object store: another machine may have to go on."""
        try:
            if self._home is not None:
                publish(self._home, self._directory)
        except BabylonError as error:  # the update itself goes well
            logger.warning("the progress stays on this machine: %s", error)


def _part(value: Tensor, like: Tensor) -> Tensor:
    return local(divided(value, like)).cpu() if isinstance(like, DTensor) else value


def _changed(record: RecordState, parameters: Sequence[Tensor], change: Change) -> RecordState:
    """A record whose kept state, if it has one, has other tensors."""
    kept: Kept | None = record.get("kept")
    if kept is None:
        return record
    weights = [change(v, p) for v, p in zip(kept["weights"], parameters, strict=True)]
    moments = with_states(kept["optimizer"], parameters, change)
    return record | {"kept": kept | {"weights": weights, "optimizer": moments}}

"""An update as a file: every rank reads it, and the first one writes what came of it."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from babylon.core.home import Home
from babylon.core.trajectories import TrainingRow
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.train_report import TrainReport
from babylon.training.preferences.objective import SCORES_ONLY, Preferences
from babylon.training.preferences.preference_report import Learnt, PreferenceReport
from babylon.training.trainable import TransferLayers, Tuning, TuningOptions
from babylon.training.update_result import Excluded, Update, update_of

_JOB, _HOME, _STEPS, _RESULT = "job.json", "home.json", "steps.json", "result.msgpack"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateJob:
    """The arguments of ``babylon.training.update.update_checkpoint``."""

    parent: str
    rows: tuple[TrainingRow, ...]
    target: Path
    tuning: Tuning
    config: TrainerConfig
    transfer_layers: TransferLayers
    options: TuningOptions
    staleness: dict[int, int]
    optimizer: str | None
    progress_directory: Path | None
    home: Home | None
    preferences: Preferences = SCORES_ONLY

    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class _Result(msgspec.Struct, kw_only=True):
    scores: TrainReport | None
    preferences: PreferenceReport | None
    excluded: Excluded
    trajectory_ids: tuple[str, ...]


class JobDirectory:
    """The files of a job, readable by this user alone, in a directory that exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_job(self, job: UpdateJob) -> None:
        """Store the job for all ranks."""
        self._write(_JOB, job)

    def read_job(self) -> UpdateJob:
        """The stored job."""
        job: UpdateJob = self._read(_JOB, UpdateJob)
        return job

    def write_home(self, home: Home) -> None:
        """Store the home of a machine whose ranks get the job from the first one."""
        self._write(_HOME, home)

    def read_home(self) -> Home | None:
        """The stored home; None on the machine that has the job."""
        home: Home | None = self._read(_HOME, Home) if (self.path / _HOME).exists() else None
        return home

    def write_steps(self, done: int, total: int) -> None:
        """Store the number of finished train steps, and the highest possible one."""
        self._write(_STEPS, (done, total))

    def read_steps(self) -> tuple[int, int] | None:
        """The last stored numbers, None before the first train step."""
        return self._read(_STEPS, tuple[int, int]) if (self.path / _STEPS).exists() else None

    def write_result(self, update: Update) -> None:
        """Store the finished update."""
        first = update.report
        assert isinstance(first, TrainReport | PreferenceReport)  # of our own trainer
        result = _Result(
            scores=first if isinstance(first, TrainReport) else None,
            preferences=first if isinstance(first, PreferenceReport) else update.preferences,
            excluded=update.excluded,
            trajectory_ids=update.trajectory_ids,
        )
        self._put(_RESULT, msgspec.msgpack.encode(result))  # figures may be infinite: no JSON

    def read_result(self) -> Update | None:
        """The finished update, None if there is none."""
        if not (self.path / _RESULT).exists():
            return None
        result = msgspec.msgpack.decode((self.path / _RESULT).read_bytes(), type=_Result)
        learnt = Learnt(
            scores=result.scores,
            preferences=result.preferences,
            trajectory_ids=result.trajectory_ids,
        )
        return update_of(learnt, result.excluded)

    def _write(self, name: str, value: object) -> None:
        self._put(name, msgspec.json.encode(value, enc_hook=str))

    def _put(self, name: str, encoded: bytes) -> None:
        part = self.path / f".{name}"
        part.write_bytes(encoded)
        part.replace(self.path / name)

    def _read(self, name: str, kind: Any) -> Any:
        encoded = (self.path / name).read_bytes()
        return msgspec.json.decode(encoded, type=kind, dec_hook=_from_json)


def _from_json(kind: type, value: object) -> object:
    return Path(str(value)) if kind is Path else value

"""Errors that an operator can act on. Each message names the value received and the remedy.

The command line prints a ``BabylonError`` as one line on stderr and exits with a non-zero code. Any
other exception is a bug and shows its traceback.

``reason_of`` is the one way from an exception to a text that is stored or told. Other libraries
quote the values that they fail on: a prompt, the ground truth, a key.
"""

import traceback
from pathlib import Path


class BabylonError(Exception):
    """Base of every error that an operator can act on."""


class ConfigError(BabylonError):
    """A setting, option or environment variable has a value that cannot be used."""


class StorageError(BabylonError):
    """The disk is full, or a path cannot be written."""


class DatabaseError(BabylonError):
    """The database is down, not migrated, or lacks what a query needs."""


class DatabaseVersionError(DatabaseError):
    """The database is at another version than this program."""


class WindowError(BabylonError):
    """A window id is malformed, or the window is not in a state that allows the request."""


class ApprovalError(BabylonError):
    """Nobody asked for an approval of the policy, or the question was answered or is too old."""


class WindowNotReadyError(WindowError):
    """The window is not over, or has too few agents to be trained."""


class AlreadyTrainedError(WindowError):
    """The window was trained before; nothing was changed."""


class FencedError(WindowError):
    """Another worker took the window over: the epoch is stale, and the write was refused."""


class SupersededError(WindowError):
    """Another policy leads than the one that the window's update started from.

    The window is trained again from the present champion; no trajectory was lost.
    """


class ExperimentRunningError(WindowError):
    """An experiment runs. The window stays scored and is trained when the experiment is decided."""


class StageTimeoutError(BabylonError):
    """A stage did not end within its limit. The next run begins it again."""


class ArtifactError(BabylonError):
    """An artifact is missing, was changed after it was written, or has another schema version."""


class ReplayError(BabylonError):
    """A recorded window lacks data needed for replay, or contradicts the game's rules."""


class ScoringError(BabylonError):
    """A scorer raised an error, or did not return one finite number for each trajectory."""


class ModelError(BabylonError):
    """A model, tokenizer or checkpoint does not load, or does not fit its base model."""


class CheckpointRefusedError(ModelError):
    """A checkpoint did not pass the ``checks`` before deployment; nothing was changed."""

    def __init__(self, message: str, checks: dict[str, object]) -> None:
        super().__init__(message)
        self.checks = checks


class TrainingError(BabylonError):
    """The update cannot be computed from this batch (nothing to train, non-finite loss)."""


class ServingError(BabylonError):
    """The gateway or the engine cannot start, load a policy, or answer."""


class RouteConflictError(ServingError):
    """The route changed since the caller read it; nothing was changed."""


class ExperimentError(ServingError):
    """The request does not fit the running experiment, or none runs; nothing was changed."""


class RecorderError(BabylonError):
    """An agent gave the recorder a value that cannot be stored."""


class PublishError(BabylonError):
    """The hub refused a commit or did not answer. Nothing is lost: the next run goes on."""


class ArenaError(BabylonError):
    """A suite or a player of the arena cannot be used."""


def reason_of(error: BaseException) -> str:
    """Return the error as one line without the values that it failed on.

    A ``BabylonError`` and a failed system call speak for themselves. Any other exception is named
    by its type and the place where it was raised.
    """
    if isinstance(error, BabylonError) and str(error):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"

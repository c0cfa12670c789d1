"""One vocabulary of errors. Each message names the value received and the remedy.

The command line turns a ``BabylonError`` into one line on stderr and a non-zero exit code;
everything else propagates with its traceback, because it is a bug.
"""

from typing import Any


class BabylonError(Exception):
    """Base of every error that an operator can act on."""


class ConfigError(BabylonError):
    """A setting, option or environment variable has a value that cannot be used."""


class StorageError(BabylonError):
    """The disk is full, or a place cannot be written."""


class DatabaseError(BabylonError):
    """The database is down, not migrated, or lacks what a query needs."""


class WindowError(BabylonError):
    """A window id is malformed, or the window is not in a state that allows the request."""


class WindowNotReadyError(WindowError):
    """The window is unfinished or holds too few agents to be trained."""


class AlreadyTrainedError(WindowError):
    """The window was trained before; nothing was changed."""


class FencedError(WindowError):
    """Another worker took the window over: this one's epoch is stale, its write was refused."""


class ArtifactError(BabylonError):
    """An artifact is missing, was changed after it was written, or has another schema version."""


class ReplayError(BabylonError):
    """A recorded window lacks what is needed to play it again, or contradicts the game's rules."""


class ScoringError(BabylonError):
    """A scorer raised, or returned something that is not one finite number a trajectory."""


class ModelError(BabylonError):
    """A model, tokenizer or checkpoint does not load or does not fit its base."""


class CheckpointRefusedError(ModelError):
    """A checkpoint did not pass the ``checks`` before deployment; nothing was changed."""

    def __init__(self, message: str, checks: dict[str, Any]) -> None:
        super().__init__(message)
        self.checks = checks


class TrainingError(BabylonError):
    """The update cannot be computed from this batch (nothing to train, non-finite loss)."""


class ServingError(BabylonError):
    """The gateway or the engine cannot start, load a policy, or answer."""


class RouteConflictError(ServingError):
    """The route changed since the caller read it; nothing was changed."""


class ExperimentError(ServingError):
    """The request does not go with the experiment that runs, or none does; nothing was changed."""


class RecorderError(BabylonError):
    """What an agent hands to the recorder cannot be stored as it is."""


class ArenaError(BabylonError):
    """A suite or a player of the arena cannot be used."""

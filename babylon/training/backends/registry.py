"""Trainers by the value of ``TRAINER``. Only the chosen trainer is imported."""

from babylon.core.errors import ConfigError
from babylon.training.backends.train_input import Updater


def updater(name: str) -> Updater:
    """Return the trainer of this name. Blocking: its first import takes seconds.

    Raises:
        ConfigError: there is no trainer of this name.
    """
    match name:
        case "torch":
            from babylon.training.backends.own_trainer import update_torch

            return update_torch
        case "serverless":
            from babylon.training.backends.serverless import update_serverless

            return update_serverless
        case "art-local":
            from babylon.training.backends.art_local import update_art_local

            return update_art_local
        case _:
            raise ConfigError(
                f"TRAINER={name!r}: no such trainer; choose torch, serverless or art-local"
            )

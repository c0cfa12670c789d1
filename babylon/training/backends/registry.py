"""The trainers by the name that ``TRAINER`` has; only the chosen one is imported."""

from babylon.core.errors import ConfigError
from babylon.training.backends.updater import Updater


def updater(name: str) -> Updater:
    """Who computes the update.

    Raises:
        ConfigError: there is no trainer of that name.
    """
    match name:
        case "torch":
            from babylon.training.backends.torch_trainer import update_torch

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

"""The trainers by the name that ``TRAINER`` has; only the chosen one is imported."""

from babylon.errors import ConfigError
from babylon.trainers.updater import Updater


def updater(name: str) -> Updater:
    """Who computes the update.

    Raises:
        ConfigError: there is no trainer of that name.
    """
    match name:
        case "torch":
            from babylon.trainers.torch_trainer import update_torch

            return update_torch
        case "serverless":
            from babylon.trainers.serverless import update_serverless

            return update_serverless
        case "art-local":
            from babylon.trainers.art_local import update_art_local

            return update_art_local
        case _:
            raise ConfigError(
                f"TRAINER={name!r}: no such trainer; choose torch, serverless or art-local"
            )

"""Can the chosen trainer work here? Asked before a window is claimed; imports next to nothing."""

from importlib.util import find_spec

from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.training.backends.wandb_account import SERVERLESS_MODELS, WandbAccount

NEEDED = ("unsloth", "unsloth_zoo", "trl", "bitsandbytes")  # what openpipe-art[backend] adds


def require_trainer(settings: Settings) -> None:
    """What can be said without the database: which policy is trained is not known yet.

    Raises:
        ConfigError: a package, an account or a fitting setting is missing; it says which.
    """
    if settings.training.trainer == "art-local":
        require_art_local(settings)
    elif settings.training.trainer == "serverless":
        require_serverless(settings, settings.model.base)


def require_lora(settings: Settings) -> None:
    """ART's trainers train LoRA adapters, without a KL penalty of our kind.

    Raises:
        ConfigError: the settings ask for something else.
    """
    if settings.training.tuning != "lora":
        raise ConfigError(
            f"TRAINER={settings.training.trainer} trains LoRA adapters, TUNING is"
            f" {settings.training.tuning!r}: set TUNING=lora, or TRAINER=torch"
        )
    if settings.training.kl_penalty:
        raise ConfigError(
            f"KL_PENALTY={settings.training.kl_penalty:g} has no counterpart in"
            f" TRAINER={settings.training.trainer}: unset it, or set TRAINER=torch"
        )


def require_art_local(settings: Settings) -> None:
    """Can ART train on this machine? Answered without importing anything.

    Raises:
        ConfigError: a setting that ART cannot follow, or a package is missing; it says which.
    """
    require_lora(settings)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"TRAINER=art-local needs {', '.join(missing)}, which openpipe-art[backend] brings:"
            " give the train stage's worker an environment of its own (docs/art.md) with `pip"
            " install 'openpipe-art[backend]==0.5.18'`, or set TRAINER=torch"
        )


def require_serverless(settings: Settings, base_model: str | None) -> WandbAccount:
    """Can W&B train this model for us? Answered without asking it; None is not known yet.

    Raises:
        ConfigError: no API key, a model that the service does not train, or a setting that it
            cannot follow.
    """
    require_lora(settings)
    account = WandbAccount.from_environment()
    if account.api_key is None:
        raise ConfigError(
            "TRAINER=serverless needs an account at W&B: set WANDB_API_KEY"
            " (https://wandb.ai/settings), or set TRAINER=torch"
        )
    if base_model is not None and base_model not in SERVERLESS_MODELS:
        raise ConfigError(
            f"TRAINER=serverless does not train {base_model}, only"
            f" {' and '.join(SERVERLESS_MODELS)}: set BASE_MODEL to one of them (in a home of its"
            " own), or set TRAINER=torch"
        )
    return account

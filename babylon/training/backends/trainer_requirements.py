"""Checks that the chosen trainer can work here, made before a window is claimed.

This module imports neither torch nor any trainer.
"""

from importlib.util import find_spec

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from babylon.core.errors import ConfigError
from babylon.core.learning_settings import TrainingSettings
from babylon.core.settings import ModelSettings

ART_LOCAL_PACKAGES = ("unsloth", "unsloth_zoo", "trl", "bitsandbytes")  # openpipe-art[backend]
# docs.wandb.ai/training/serverless-rl/available-models → context in tokens
SERVERLESS_MODELS = {
    "OpenPipe/Qwen3-14B-Instruct": 32_768,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 262_144,
}


class WandbAccount(BaseSettings):
    """The W&B account that trains for us, from W&B's own environment names."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    api_key: SecretStr = Field(default=SecretStr(""), validation_alias="WANDB_API_KEY")
    entity: str | None = Field(default=None, validation_alias="WANDB_ENTITY")
    training_url: str | None = Field(  # of the training API; None: W&B's own
        default=None, validation_alias="WANDB_TRAINING_URL"
    )


def require_trainer(training: TrainingSettings, model: ModelSettings) -> None:
    """Check the chosen trainer, without the database: the parent policy is not known yet.

    Raises:
        ConfigError: a package, an account or a fitting setting is missing.
    """
    if training.trainer == "art-local":
        require_art_local(training)
    elif training.trainer == "serverless":
        require_serverless(training, model.base)


def _require_lora(training: TrainingSettings) -> None:
    """Check the settings that ART's trainers have no counterpart for."""
    if training.tuning != "lora":
        raise ConfigError(
            f"TRAINER={training.trainer} trains LoRA adapters, TUNING is"
            f" {training.tuning!r}: set TUNING=lora, or TRAINER=torch"
        )
    if training.objective != "grpo":
        raise ConfigError(
            f"OBJECTIVE={training.objective} has no counterpart in TRAINER={training.trainer}:"
            " unset it, or set TRAINER=torch"
        )
    if training.kl_penalty:
        raise ConfigError(
            f"KL_PENALTY={training.kl_penalty:g} has no counterpart in"
            f" TRAINER={training.trainer}: unset it, or set TRAINER=torch"
        )
    if training.recall_chats:
        raise ConfigError(
            f"RECALL_CHATS={training.recall_chats} is not measured by TRAINER={training.trainer}:"
            " unset it, or set TRAINER=torch"
        )


def require_art_local(training: TrainingSettings) -> None:
    """Check that ART can train on this machine, without importing it.

    Raises:
        ConfigError: ART does not support a setting, or a package is missing.
    """
    _require_lora(training)
    if missing := [name for name in ART_LOCAL_PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"TRAINER=art-local needs {', '.join(missing)}, which openpipe-art[backend] installs:"
            " give the train stage's worker an environment of its own (docs/art.md) with `pip"
            " install 'openpipe-art[backend]==0.5.18'`, or set TRAINER=torch"
        )


def require_serverless(training: TrainingSettings, base_model: str | None) -> WandbAccount:
    """Check that W&B can train ``base_model``, without a request. None: not known yet.

    Raises:
        ConfigError: there is no API key, or the service does not support the model or a setting.
    """
    _require_lora(training)
    account = WandbAccount()
    if not account.api_key:
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

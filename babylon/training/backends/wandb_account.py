"""The account at W&B that trains for us, from the environment names that W&B itself uses."""

from typing import Any

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

# docs.wandb.ai/training/serverless-rl/available-models → context in tokens
SERVERLESS_MODELS = {
    "OpenPipe/Qwen3-14B-Instruct": 32_768,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 262_144,
}


class WandbAccount(BaseSettings):
    """``training_url`` is where the training API answers, W&B's own by default."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    api_key: SecretStr | None = Field(None, validation_alias="WANDB_API_KEY")
    entity: str | None = Field(None, validation_alias="WANDB_ENTITY")
    training_url: str | None = Field(None, validation_alias="WANDB_TRAINING_URL")

    @classmethod
    def from_environment(cls) -> "WandbAccount":
        given: dict[str, Any] = {}
        return cls(**given)

    @property
    def key(self) -> str:
        """Whoever asks has made sure that there is one."""
        assert self.api_key is not None
        return self.api_key.get_secret_value()

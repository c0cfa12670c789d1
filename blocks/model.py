"""A named base model and how it is tuned."""

from typing import Any, Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl


class BabylonModel(Block):
    """The model that a deployment trains.

    Example:
        ```python
        from blocks.model import BabylonModel

        model = BabylonModel.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon model"
    _block_type_slug = "babylon-model"
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
    _description = "A base model and the way it is tuned."

    base_model: str | None = Field(
        default=None, description="Hugging Face id or local path; empty for the embedded model."
    )
    model_name: str = Field(default="babylon", description="Name that agents ask for.")
    tuning: Literal["lora", "full"] = Field(
        default="lora", description="Train a LoRA adapter, or all weights."
    )

    def overrides(self) -> dict[str, Any]:
        return {
            "base_model": self.base_model,
            "model_name": self.model_name,
            "tuning": self.tuning,
        }

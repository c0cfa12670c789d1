"""A named base model and its tuning."""

from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl


class BabylonModel(Block):
    """The model that a deployment trains.

    Example:
        ```python
        from babylon.blocks.model import BabylonModel

        model = BabylonModel.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon model"
    _block_type_slug = "babylon-model"
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
    _description = "A base model and the way it is tuned."

    base_model: str | None = Field(default=None, description="Hugging Face id or local path.")
    model_name: str | None = Field(default=None, description="Name that agents ask for.")
    tuning: Literal["lora", "full"] | None = Field(
        default=None, description="Train a LoRA adapter, or all weights."
    )

    def overrides(self) -> dict[str, dict[str, str]]:
        """Return the fields that are set. The environment decides the others."""
        model = {"base": self.base_model, "name": self.model_name}
        return {
            "model": {name: value for name, value in model.items() if value is not None},
            "training": {"tuning": self.tuning} if self.tuning else {},
        }

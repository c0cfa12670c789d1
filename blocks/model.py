"""A named base model and its tuning."""

from typing import ClassVar, Literal

from pydantic import Field

from babylon.blocks.settings_block import SettingsBlock, Variables


class BabylonModel(SettingsBlock):
    """The model that a deployment trains.

    Example:
        ```python
        from babylon.blocks.model import BabylonModel

        model = BabylonModel.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon model"
    _block_type_slug = "babylon-model"
    _description = "A base model and the way it is tuned."
    variables: ClassVar[Variables] = {
        "base_model": "BASE_MODEL",
        "model_name": "MODEL_NAME",
        "tuning": "TUNING",
    }

    base_model: str | None = Field(default=None, description="Hugging Face id or local path.")
    model_name: str | None = Field(default=None, description="Name that agents ask for.")
    tuning: Literal["lora", "full"] | None = Field(
        default=None, description="Train a LoRA adapter, or all weights."
    )

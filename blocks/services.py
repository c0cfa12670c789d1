"""Named services that runs use: a judge, an artifact store, Hugging Face, Weights & Biases."""

from typing import ClassVar, Literal

from pydantic import Field, SecretStr

from babylon.blocks.settings_block import SettingsBlock, Variables


class BabylonJudge(SettingsBlock):
    """The server that judges play.

    Example:
        ```python
        from babylon.blocks.services import BabylonJudge

        judge = BabylonJudge.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon judge"
    _block_type_slug = "babylon-judge"
    _description = "A model behind an OpenAI-compatible server that judges play."
    variables: ClassVar[Variables] = {
        "judge_model": "JUDGE_MODEL",
        "base_url": "JUDGE_BASE_URL",
        "api_key": "OPENAI_API_KEY",
        "day_usd": "JUDGE_DAY_USD",
    }

    judge_model: str | None = Field(default=None, description="Name of the model at its server.")
    base_url: str | None = Field(default=None, description="Address of the server.")
    api_key: SecretStr | None = Field(default=None, description="API key of the server.")
    day_usd: float | None = Field(
        default=None, ge=0, description="US dollars that the judge may cost in a UTC day."
    )


class BabylonArtifactStore(SettingsBlock):
    """The object store for the files that stages hand on.

    Example:
        ```python
        from babylon.blocks.services import BabylonArtifactStore

        artifacts = BabylonArtifactStore.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon artifact store"
    _block_type_slug = "babylon-artifact-store"
    _description = "An object store with checkpoints and the files between stages."
    variables: ClassVar[Variables] = {"uri": "ARTIFACT_STORE"}

    uri: str = Field(description="Address of the store, such as s3://bucket/prefix.")


class BabylonHuggingFace(SettingsBlock):
    """The repositories on the Hugging Face Hub that get the dataset and the policies.

    Example:
        ```python
        from babylon.blocks.services import BabylonHuggingFace

        hub = BabylonHuggingFace.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon Hugging Face"
    _block_type_slug = "babylon-hugging-face"
    _description = "The account and the repositories that play and policies are published to."
    variables: ClassVar[Variables] = {
        "token": "HF_TOKEN",
        "dataset": "PUBLISH_TO",
        "models": "PUBLISH_MODELS_TO",
    }

    token: SecretStr | None = Field(default=None, description="Access token of the hub.")
    dataset: str | None = Field(default=None, description="Dataset repository, owner/name.")
    models: str | None = Field(default=None, description="Model repository, owner/name.")


class BabylonWandb(SettingsBlock):
    """The Weights & Biases project that gets each window's metrics.

    Example:
        ```python
        from babylon.blocks.services import BabylonWandb

        tracking = BabylonWandb.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Babylon Weights and Biases"
    _block_type_slug = "babylon-wandb"
    _description = "A project; the account's key stays in WANDB_API_KEY of the worker."
    variables: ClassVar[Variables] = {
        "project": "WANDB_PROJECT",
        "mode": "WANDB_MODE",
        "models": "WANDB_MODELS",
    }

    project: str = Field(description="Project that gets the metrics.")
    mode: Literal["offline", "online", "disabled"] | None = Field(
        default=None, description="Files for a later sync, or sent at once."
    )
    models: bool | None = Field(
        default=None, description="Each promoted policy becomes an artifact."
    )

"""Shapes of ART's objects that we use. ART has no type information of its own."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from openai.types.chat.chat_completion import Choice

MessageDict = Mapping[str, object]


class ArtModel(Protocol):
    """An ``art.Model`` or ``art.TrainableModel``."""

    name: str
    project: str
    base_model: str
    base_path: str
    trainable: bool
    inference_model_name: str | None


class ArtHistory(Protocol):
    """An ``art.History``: a chat, in which each choice is a reply of the policy."""

    messages_and_choices: Sequence[MessageDict | Choice]
    tools: Sequence[object] | None


class ArtTrajectory(ArtHistory, Protocol):
    """An ``art.Trajectory``: a history, further histories, and their reward."""

    additional_histories: Sequence[ArtHistory]
    reward: float


class SftConfig(Protocol):
    """An ``art.TrainSFTConfig``."""

    learning_rate: float | list[float]  # of all steps, or of each
    batch_size: int | Literal["auto"]

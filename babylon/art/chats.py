"""ART's trajectories as calls: one call for each reply of the policy.

ART stores a chat as a list of messages and *choices*. A choice is a reply of the policy to
everything before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, Protocol

from openai.types.chat.chat_completion import Choice

from babylon.core.errors import TrainingError
from babylon.core.trajectories import Call, Message

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


Prompt = Callable[[list[dict[str, str]]], list[int]]  # messages → prompt tokens


def calls_of(trajectory: ArtTrajectory, prompt: Prompt, *, every_reply: bool) -> Iterator[Call]:
    """The calls of a trajectory and of its additional histories.

    A choice with token ids and logprobs becomes a call with exact tokens. Any other choice becomes
    text, which the trainer tokenises. Assistant messages that are not choices were not sampled from
    the policy; they become calls only with ``every_reply``.

    Raises:
        TrainingError: the trajectory has tools, which this trainer cannot render.
    """
    for step, history in enumerate(chain([trajectory], trajectory.additional_histories)):
        if history.tools:
            raise TrainingError("a trajectory with tools: this trainer takes plain chats")
        messages: list[dict[str, str]] = []
        for item in history.messages_and_choices:
            message = item.message.to_dict() if isinstance(item, Choice) else item
            if message.get("tool_calls"):
                raise TrainingError("a reply with tool calls: this trainer takes plain chats")
            role, text = str(message["role"]), _text(message)
            if role == "assistant" and (every_reply or isinstance(item, Choice)):
                exact = _exact_tokens(item) if isinstance(item, Choice) else None
                token_ids, logprobs = exact if exact else (None, None)
                yield Call(
                    step=step,
                    messages=tuple(Message(role=m["role"], content=m["content"]) for m in messages),
                    response=text,
                    prompt_token_ids=tuple(prompt(messages)) if exact else None,
                    completion_token_ids=token_ids,
                    logprobs=logprobs,
                )
            messages.append({"role": role, "content": text})


def _text(message: MessageDict) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise TrainingError(f"{message['role']} message with {content!r:.80}: text is needed")
    return "".join(found)


def _exact_tokens(choice: Choice) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """(token ids, logprobs ``[T]``) as sampled, or None if either is unknown.

    Ids stand in ``token_ids`` beside the logprobs, or as vLLM's ``token_id:N`` in place of texts.
    """
    scored = choice.logprobs.content if choice.logprobs else None
    if not scored:
        return None
    token_ids: Sequence[int] | None = (choice.model_extra or {}).get("token_ids")
    if token_ids is None and all(token.token.startswith("token_id:") for token in scored):
        token_ids = [int(token.token.removeprefix("token_id:")) for token in scored]
    if token_ids is None or len(token_ids) != len(scored):
        return None
    return tuple(token_ids), tuple(token.logprob for token in scored)

"""ART's trajectories as calls: one for each reply that the policy gave.

ART keeps a chat as a list of messages and of *choices*, the latter being what the policy answered.
A choice is the reply to everything before it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from openai.types.chat.chat_completion import Choice

from babylon.core.errors import TrainingError
from babylon.core.trajectories import Call, Message

Prompt = Callable[[list[dict[str, Any]]], list[int]]  # messages → prompt tokens


def calls_of(trajectory: Any, prompt: Prompt, *, every_reply: bool) -> Iterator[Call]:
    """The calls of an ``art.Trajectory``, its additional histories included.

    A choice with token ids and logprobs is exact; one without is text, which the trainer
    tokenises. Assistant messages that are no choice were not sampled from the policy: they count
    only with ``every_reply``.

    Raises:
        TrainingError: tools, which this trainer cannot render.
    """
    histories = chain([trajectory], trajectory.additional_histories)
    for step, history in enumerate(histories):
        if history.tools:
            raise TrainingError("a trajectory with tools: this trainer takes plain chats")
        messages: list[dict[str, Any]] = []
        for item in history.messages_and_choices:
            reply = _reply(item)
            if reply is not None and (every_reply or isinstance(item, Choice)):
                yield _call(step, messages, reply, item, prompt)
            messages.append(item if reply is None else {"role": "assistant", "content": reply})


def _call(step: int, messages: list[dict[str, Any]], reply: str, item: Any, prompt: Prompt) -> Call:
    exact = _exact_tokens(item) if isinstance(item, Choice) else None
    token_ids, logprobs = exact if exact else (None, None)
    return Call(
        step=step,
        messages=tuple(Message(role=m["role"], content=_text(m)) for m in messages),
        response=reply,
        prompt_token_ids=tuple(prompt(messages)) if exact else None,
        completion_token_ids=token_ids,
        logprobs=logprobs,
    )


def _reply(item: Any) -> str | None:
    """The assistant's text, None for a message of somebody else."""
    message = item.message.to_dict() if isinstance(item, Choice) else item
    if message["role"] != "assistant":
        return None
    if message.get("tool_calls"):
        raise TrainingError("a reply with tool calls: this trainer takes plain chats")
    return _text(message)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise TrainingError(f"{message['role']} message with {content!r:.80}: text is needed")
        content = "".join(texts)
    return content


def _exact_tokens(choice: Choice) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """(token ids, logprobs ``[T]``) as sampled, None when either is unknown.

    Ids come beside the logprobs (``token_ids``), or as vLLM's ``token_id:N`` in place of texts.
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

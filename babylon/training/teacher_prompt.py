"""The prompt of the teacher of self-distillation: the recorded prompt with feedback at its end.

Teacher and student differ in the feedback alone. A call whose messages do not give its recorded
tokens again is therefore left without a teacher.
"""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from babylon.core.llm_calls import Message
from babylon.core.trajectories import Call
from babylon.policies.tokenizer import render_prompt


def teacher_prompt(
    tokenizer: PreTrainedTokenizerBase, call: Call, prompt: Sequence[int], words: str, room: int
) -> tuple[int, ...]:
    """Tokens of the call's messages with ``words`` at the end of the last one.

    Empty if the messages do not give ``prompt`` again, if the chat template refuses them, or if
    the result is longer than ``room`` tokens.
    """
    tools = list(call.tools) or None
    try:
        if not call.messages or [*prompt] != render_prompt(tokenizer, call.messages, tools):
            return ()
        told = render_prompt(tokenizer, _with_words(call.messages, words), tools)
    except (TemplateError, TypeError, ValueError):  # parts, or no template: the engine knows more
        return ()
    return tuple(told) if len(told) <= room else ()


def _with_words(messages: Sequence[Message], words: str) -> list[Message]:
    """The messages with the words in the last one, or after it if that is not a user's text."""
    *before, last = messages
    content = last.get("content")
    if last.get("role") == "user" and isinstance(content, str):
        return [*before, {**last, "content": f"{content}\n\n{words}"}]
    return [*messages, {"role": "user", "content": words}]

"""ART's trajectories as calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from babylon.art.backend import calls_of
from babylon.core.errors import TrainingError


def test_a_message_that_is_not_text_is_refused_without_its_words() -> None:
    content = [{"type": "text", "text": "SECRET"}, {"type": "image_url", "image_url": {"url": "u"}}]
    chat: Any = SimpleNamespace(
        messages_and_choices=[{"role": "user", "content": content}],
        tools=None,
        additional_histories=[],
    )
    with pytest.raises(TrainingError, match="user message with a part of type image_url") as error:
        list(calls_of(chat, lambda messages, tools: [], every_reply=False))
    assert "SECRET" not in str(error.value)

"""ART's trajectories as calls, and the steps that the backend serves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from babylon.art import backend
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


async def test_only_the_newest_and_leased_steps_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: set[str] = set()

    class Engine:
        async def load(self, name: str, path: str, version: int) -> None:
            served.add(name)

        def unload(self, name: str) -> None:
            served.discard(name)

    def update(parent: str, rows: object, target: Path, **_: object) -> Any:
        target.mkdir(parents=True)
        return SimpleNamespace(report=None)

    monkeypatch.setattr(backend, "EmbeddedEngine", Engine)
    monkeypatch.setattr(backend, "update_checkpoint", update)
    monkeypatch.setattr(backend, "to_art", lambda _: {})
    ours = backend.Backend(tmp_path)
    model: Any = SimpleNamespace(name="m", project="p", base_model="b/c", trainable=True)
    await ours.train(model, [])
    async with ours.adapter_lease(model, 0):
        await ours.train(model, [])
        assert served == {"m@0", "m@2"}
    await ours.train(model, [])
    assert served == {"m@3"}

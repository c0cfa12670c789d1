"""Errors of the training service are stored without the play that was sent to it."""

from types import SimpleNamespace
from typing import Any

import httpx
import openai

from babylon.core.trajectories import Call
from babylon.training.backends.serverless import provider_message

CALL = Call(step=0, messages=({"role": "user", "content": "Will zebras win?"},), response="buy yes")
WORK: Any = SimpleNamespace(rows=[SimpleNamespace(calls=(CALL,))])


def test_a_message_keeps_its_own_words_and_loses_those_of_prompts_and_replies() -> None:
    said = provider_message(
        RuntimeError("the GPUs are on fire: 'Will zebras win?' 'buy yes'"), WORK
    )
    assert said.startswith("the GPUs are on fire")
    assert not any(word in said for word in ("Will", "zebras", "win", "buy"))


def test_an_error_without_a_connection_names_its_cause() -> None:
    request = httpx.Request("POST", "http://127.0.0.1:9")
    error = openai.APIConnectionError(request=request)
    error.__cause__ = OSError("no route to the service")
    assert "no route to the service" in provider_message(error, WORK)

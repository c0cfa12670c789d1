"""LiteLLM callback that writes every call as a line of JSON to the disk.

LiteLLM imports this file from the directory of its configuration, where ``callbacks`` names it
(https://docs.litellm.ai/docs/proxy/logging, "Custom Callback Class"). It runs in LiteLLM's
environment and after the answer, so a call may be lost if the proxy dies.
"""

import json
import os
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

FILE = "litellm.calls"


class Recorder(CustomLogger):
    """Writes in the event loop: a thread would cost LiteLLM more processor time than it saves."""

    def __init__(self) -> None:
        super().__init__()
        self._file = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        line = json.dumps(kwargs["standard_logging_object"], default=str)
        os.write(self._file, line.encode() + b"\n")
        os.fdatasync(self._file)


recorder = Recorder()

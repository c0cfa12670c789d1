"""The deployed flow of ``test_pool_worker``: a stage that returns, fails, hangs or is killed."""

import os
import signal
import time
from pathlib import Path
from typing import Literal

from prefect import flow

from babylon.core.errors import TrainingError

Ending = Literal["return", "fail", "hang", "be killed once"]


@flow(name="staged", result_serializer="json", persist_result=True)
def staged(ending: Ending, mark: str) -> dict[str, int]:
    """Write a line with its pid into the file ``mark``, then end as told."""
    path = Path(mark)
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    begun = len(path.read_text().split())
    if ending == "fail":
        raise TrainingError("no memory for 3 sequences")
    if ending == "hang":
        time.sleep(600)
    if ending == "be killed once" and begun == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"begun": begun}

"""The largest size of a trajectory. A finish holds all of it in memory, several times, and a scorer
its feedback."""

from collections.abc import Sequence

from babylon.serving.openai_wire import RequestError
from babylon.store.connection import Connection
from babylon.store.feedback import feedback_bytes
from babylon.store.plays import StoredPlay, call_bytes, stored_bytes

MAX_STORED_BYTES = 2**25  # of steps and spans
MAX_FEEDBACK_BYTES = 2**25  # a scorer holds that of all trajectories of a window
MAX_CALL_BYTES = 2**27  # of the calls' prompts and answers


async def require_room(connection: Connection, trajectory_id: str) -> None:
    """Check a trajectory with what was added to it in this transaction.

    Raises:
        RequestError: 413, a finish could not hold it.
    """
    size, most = await stored_bytes(connection, trajectory_id), MAX_STORED_BYTES
    remedy = "send less in each, or finish it and start another"
    _require(size, most, trajectory_id, "steps and spans", remedy)


async def require_few_calls(
    connection: Connection, play: StoredPlay, call_ids: Sequence[str]
) -> None:
    """Check the size of a trajectory's calls, and of these, before they are read.

    Raises:
        RequestError: 413, a finish could not hold them.
    """
    size, most = await call_bytes(connection, play, call_ids), MAX_CALL_BYTES
    what, remedy = "prompts and answers of calls", "finish sooner and start another"
    _require(size, most, play.trajectory_id, what, remedy)


async def require_little_feedback(connection: Connection, trajectory_id: str) -> None:
    """Check a trajectory's feedback with what was added to it in this transaction.

    Raises:
        RequestError: 413, it would be too much.
    """
    size, most = await feedback_bytes(connection, trajectory_id), MAX_FEEDBACK_BYTES
    _require(size, most, trajectory_id, "feedback", "send fewer pieces, and shorter comments")


def _require(size: int, most: int, trajectory_id: str, what: str, remedy: str) -> None:
    if size > most:
        raise RequestError(
            413,
            f"trajectory {trajectory_id!r:.80} would have {size} bytes of {what}, of at most"
            f" {most}: {remedy}",
            code="too_large",
        )

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
    size = await stored_bytes(connection, trajectory_id)
    if size > MAX_STORED_BYTES:
        raise RequestError(
            413,
            f"trajectory {trajectory_id!r:.80} would have {size} bytes of steps and spans, of at"
            f" most {MAX_STORED_BYTES}: send less in each, or finish it and start another",
            code="too_large",
        )


async def require_few_calls(
    connection: Connection, play: StoredPlay, call_ids: Sequence[str]
) -> None:
    """Check the size of a trajectory's calls, and of these, before they are read.

    Raises:
        RequestError: 413, a finish could not hold them.
    """
    size = await call_bytes(connection, play, call_ids)
    if size > MAX_CALL_BYTES:
        raise RequestError(
            413,
            f"calls of trajectory {play.trajectory_id!r:.80} have {size} bytes of prompts and"
            f" answers, of at most {MAX_CALL_BYTES}: finish sooner and start another",
            code="too_large",
        )


async def require_little_feedback(connection: Connection, trajectory_id: str) -> None:
    """Check a trajectory's feedback with what was added to it in this transaction.

    Raises:
        RequestError: 413, it would be too much.
    """
    size = await feedback_bytes(connection, trajectory_id)
    if size > MAX_FEEDBACK_BYTES:
        raise RequestError(
            413,
            f"trajectory {trajectory_id!r:.80} would have {size} bytes of feedback, of at most"
            f" {MAX_FEEDBACK_BYTES}: send fewer pieces, and shorter comments",
            code="too_large",
        )

"""Events that a run itself tells Prefect. The supervisor tells all others (``ops.up.news``)."""

from collections.abc import Sequence

from prefect.events import emit_event

from babylon.core.windows import Window

READY = "window.ready"


def tell_ready(windows: Sequence[Window]) -> None:
    """Tell that windows have all that they need, and are about to be trained."""
    for window in windows:
        emit_event(
            f"babylon.{READY}",
            resource={"prefect.resource.id": f"babylon.window.{window.key}"},
            payload={"message": f"window {window.key} is ready for training"},
        )

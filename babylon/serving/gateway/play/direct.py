"""Events of play to a store, without a gateway: for programs that hold the database's address."""

from collections.abc import Sequence

from babylon.core.api_keys import LOCAL
from babylon.recorder.client import AsyncSend, PlayObject
from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.play.app import apply_all
from babylon.serving.gateway.play.handler import PlayHandler
from babylon.serving.gateway.recording_rules import RecordingRules
from babylon.store import Store


def to_store(store: Store, *, minutes: int = 60, key_id: str = LOCAL) -> AsyncSend:
    """Return the function ``send_by`` of ``AsyncPlayClient``.

    Args:
        minutes: length of windows.
        key_id: the key that the trajectories belong to, and that made their calls.
    """
    rules = RecordingRules()
    handler = PlayHandler(store, minutes, rules)
    caller = Principal(key_id=key_id, digest=b"", scopes=frozenset())

    async def send(events: Sequence[PlayObject]) -> list[PlayObject]:
        await rules.renew(store)
        return [one.model_dump() for one in await apply_all(handler, caller, events)]

    return send

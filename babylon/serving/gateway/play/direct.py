"""Events of play to a store, without a gateway: for programs that hold the database's address."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial

from anyio.from_thread import start_blocking_portal

from babylon.core.api_keys import LOCAL
from babylon.recorder.client import AsyncSend, PlayObject, Send
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


@contextmanager
def blocking_to_store(
    opening: AbstractAsyncContextManager[Store], *, minutes: int = 60, key_id: str = LOCAL
) -> Iterator[Send]:
    """Yield the function ``send_by`` of ``PlayClient``, for a program without an event loop.

    Args:
        opening: ``open_store(settings)``; it is open in a thread while the block runs.
        minutes, key_id: as for ``to_store``.
    """
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(opening) as store:
        yield partial(portal.call, to_store(store, minutes=minutes, key_id=key_id))

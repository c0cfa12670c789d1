"""The last state that a gateway read from the database, on its disk.

A gateway that starts while the database is away serves the route of this file, with the keys and
the rules of recording that were in force. Calls stay in segments until the database is back.
A gateway of another database does not read it: its keys and policies are not that one's.
"""

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from pathlib import Path

import msgspec

from babylon.core.errors import DatabaseError, DatabaseVersionError
from babylon.core.home import Home, make_directory
from babylon.core.settings import DatabaseSettings
from babylon.serving.gateway.route_table import Target
from babylon.store import Store
from babylon.store.address import parse_url
from babylon.store.api_keys import StoredKey
from babylon.store.connection import Remembered, store_when_back
from babylon.store.gateways import Desired
from babylon.store.recording_rules import RecordingRule

log = logging.getLogger(__name__)


class LastKnown(msgspec.Struct, frozen=True, kw_only=True):
    """State with which a gateway serves without the database.

    ``place``: the database's address, ``targets``: the wanted policies.
    """

    place: str
    store: Remembered
    desired: Desired
    targets: Sequence[Target]
    keys: Sequence[StoredKey]
    rules: Sequence[RecordingRule]


class LastKnownFile:
    """The file of one gateway's address in a home, for the database at ``place``."""

    def __init__(self, path: Path, place: str) -> None:
        self._path, self.place, self._written = path, place, b""

    def read(self) -> LastKnown | None:
        """Return what was written last.

        ``None`` if nothing was, another version wrote it, or a gateway of another database.
        """
        with suppress(FileNotFoundError):
            try:
                known = msgspec.json.decode(self._path.read_bytes(), type=LastKnown)
            except msgspec.DecodeError as error:
                log.warning("%s is not read: %s", self._path, error)
            else:
                if known.place == self.place:
                    return known
                why = f"it is of the database {known.place}, not {self.place}"
                log.warning("%s is not read: %s", self._path, why)
        return None

    def write(self, known: LastKnown) -> None:
        """Replace the file, which only the owner reads: it holds the digests of keys."""
        text = msgspec.json.encode(known)
        if text == self._written:
            return
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            make_directory(self._path.parent)
            part.unlink(missing_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as error:  # a full disk must not stop the gateway
            log.warning("the last route is not kept: %s", error)
        else:
            self._written = text


def last_known_file(home: Path, port: int, database: DatabaseSettings) -> LastKnownFile:
    url = database.url
    place = parse_url(url.get_secret_value()).place if url else "embedded"
    # Not *.json: in that directory these are the records of processes.
    return LastKnownFile(home / "run" / f"last-known-{port}", place)


@asynccontextmanager
async def store_or_last_known(
    opened: AbstractAsyncContextManager[Store],
    database: DatabaseSettings,
    home: Home,
    known: LastKnown | None,
) -> AsyncIterator[Store]:
    """Open the store. While its server is away, open one that works once the server is back.

    Raises:
        DatabaseError: the database is away, and there is nothing to serve without it. Or it is
            there, at another version than this program's.
    """
    async with AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(opened)
        except (DatabaseError, OSError) as error:
            if known is None or database.url is None or isinstance(error, DatabaseVersionError):
                raise
            route = known.desired.route.route_version
            log.warning("%s: serving the last known route %d", error, route)
            away = store_when_back(database, home, known.store)
            store = await stack.enter_async_context(away)
        yield store

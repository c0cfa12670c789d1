"""Closed segments in the object store, from which another gateway ships them if this host dies.

A segment that waits for the database longer than ``LOOK_S`` is copied to the store. Every gateway
whose own segments do not wait brings stored ones to its disk, where its ``Shipper`` takes them over
like those of a process that ended. The gateway that ships a segment deletes the object. The owner
may ship it too: each call is stored once. The segment that is still being written is not copied.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import NoReturn

from babylon.core.errors import BabylonError
from babylon.core.home import Home
from babylon.core.objects import names, read, remove, replace
from babylon.serving.gateway.segments import SUFFIXES
from babylon.serving.gateway.shipping import Shipper

log = logging.getLogger(__name__)
LOOK_S = 30.0


class Handover:
    """Copies segments to the home's object store and back while ``run`` runs."""

    def __init__(self, home: Home, shipper: Shipper) -> None:
        self._home, self._shipper = home, shipper
        self._waiting: set[Path] = set()  # at the last look
        self._stored: set[Path] = set()  # whose objects go once they are shipped here

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (BabylonError, OSError) as error:
                log.warning("segments are not exchanged with the object store: %s", error)

    async def look(self) -> None:
        """Store the segments that wait since the last look, or ship those of other hosts.

        Raises:
            BabylonError, OSError: the store or the disk fails; the next look tries again.
        """
        waiting = set(self._shipper.closed)
        late, self._waiting = waiting & self._waiting - self._stored, waiting
        for path in sorted(late):
            await asyncio.to_thread(replace, self._home, path)
            self._stored.add(path)
            log.warning("%s waits for the database: a copy is in the object store", path.name)
        for path in sorted(self._stored - waiting):
            if not path.exists():
                await asyncio.to_thread(remove, self._home, path)
                self._stored.remove(path)
        if not waiting:
            for path in await asyncio.to_thread(names, self._home, self._home.recording):
                if path.suffix in SUFFIXES and not path.exists():
                    await asyncio.to_thread(self._bring, path)
                    self._stored.add(path)
                    log.info("the segment %s of another gateway is shipped", path.name)

    def _bring(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(read(self._home, path))
        part.chmod(0o600)
        part.rename(path)

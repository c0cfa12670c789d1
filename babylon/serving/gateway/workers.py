"""Several processes of one gateway, which share its addresses.

Each process is a gateway of its own: it follows the routes, records, and has a row in
``babylon.gateways``. That row names its control address, through which deployments check it. The
kernel spreads connections over the processes (SO_REUSEPORT). ``babylon serve`` opens the control
sockets and keeps them open: a control address outlives the process, and callers wait there for the
next one.
"""

import asyncio
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import dataclass

from babylon.serving.gateway.readiness import Readiness, State

JOIN_S = 10.0  # a process that cannot serve by then answers too, and says why it cannot
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """This process among those of its gateway.

    Attributes:
        number: from 1.
        control: descriptor of its control socket, which it inherits.
        ports: the control ports of all processes, on loopback.
    """

    number: int
    control: int
    ports: tuple[int, ...]

    @property
    def port(self) -> int:
        """The control port of this process."""
        return self.ports[self.number - 1]

    @property
    def url(self) -> str:
        """The control address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line options that ``worker_from_options`` reads."""
        ports = ",".join(map(str, self.ports))
        return f"--number={self.number}", f"--control={self.control}", f"--ports={ports}"


def worker_from_options() -> Worker | None:
    """Read this process's options; ``None`` if the gateway has no other process."""
    parser = ArgumentParser()
    parser.add_argument("--number", type=int)
    parser.add_argument("--control", type=int)
    parser.add_argument("--ports", type=lambda text: tuple(map(int, text.split(","))))
    given = parser.parse_args()
    return None if given.number is None else Worker(**vars(given))


async def until_settled(readiness: Readiness) -> None:
    """Wait until the process serves, so that one that starts takes no calls from the others."""
    with suppress(TimeoutError):
        async with asyncio.timeout(JOIN_S):
            while readiness.state in (State.STARTING, State.LOADING):
                await asyncio.sleep(_POLL_S)

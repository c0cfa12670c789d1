"""The engines of one gateway, which all hold the same policies.

A call goes to the engine that answered its conversation's beginning before, which still has it in
its cache, unless that engine has clearly more to do than the others. A call that an engine breaks
goes to another one, and the gateway asks the engine itself: its client may have made it fail. An
engine that does not answer the gateway gets no calls until it does again; calls that wait there for
their first byte go to another one. After ``FAILURES`` failed calls without an answer between them,
it must answer a call of the gateway's own. An engine that was restarted loads its policies before
it gets calls.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b

from babylon.core.errors import ServingError
from babylon.serving.gateway.engine_client import EngineClient, EngineDownError
from babylon.serving.gateway.engine_connections import EngineResponse
from babylon.serving.gateway.readiness import FAILURES
from babylon.serving.gateway.route_table import Target

log = logging.getLogger(__name__)

PREFIX_BYTES = 1024  # of a request: system prompt and first message, so the turns of one play agree
SLACK = 1.25  # times the mean load, and one call: beyond it, another engine takes the call
TRIES = 3  # engines of one call: one that crashes them must not crash all
FOLLOW_S = 10.0  # within which the other engines may follow the first half that loaded a policy
_TRY_ELSEWHERE = frozenset({404, 502, 503, 504})  # lost the policy, or cannot answer now


class Member:
    """One engine. ``down`` is set while it does not answer.

    ``running``: calls that it answers; ``failed``: calls that it broke since it last answered one.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.running = self.failed = 0
        self.down = asyncio.Event()
        self.held: frozenset[str] = frozenset()
        self.loading: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Ask what it holds."""
        try:
            limit_s = 1.0 if self.down.is_set() else None  # it must not delay the others each time
            async with asyncio.timeout(limit_s):
                held = await self.client.policies()
        except (ServingError, TimeoutError) as error:
            self.fail(error)
        else:
            if self.failed < FAILURES:
                self._serve(held)
            else:
                self._ask(self._probe(held))

    def call_failed(self) -> None:
        """Note a call that got no answer, and look."""
        self.failed += 1
        self._ask(self.look())

    def _ask(self, question: Coroutine[None, None, None]) -> None:
        if self._asking is None or self._asking.done() or self._asking is asyncio.current_task():
            self._asking = asyncio.create_task(question)
        else:
            question.close()

    async def _probe(self, held: frozenset[str]) -> None:
        try:
            for name in sorted(held)[:1]:
                await self.client.probe(name)
        except EngineDownError as error:
            if self.failed:  # no other call was answered meanwhile: it is not only slow
                self.fail(error)
        else:
            self.failed = 0
            self._serve(held)

    def _serve(self, held: frozenset[str]) -> None:
        if self.down.is_set():
            log.info("the engine at %s answers again", self.client.url)
        self.held = held
        self.down.clear()

    def fail(self, error: BaseException) -> None:
        if not self.down.is_set():
            log.warning("the engine at %s gets no calls: %s", self.client.url, error)
        self.down.set()
        self.held = frozenset()

    async def load(self, target: Target) -> None:
        try:
            await self.client.load(target)
        except EngineDownError as error:
            self.fail(error)
            raise
        self.held |= {target.name}


class EnginePool:
    """Loads, unloads and calls policies like an ``EngineClient``, on one engine or several."""

    def __init__(self, clients: Iterable[EngineClient]) -> None:
        self.members = [Member(client) for client in clients]
        self._kept: Sequence[Target] = ()

    def keep(self, targets: Sequence[Target]) -> None:
        """Set the policies that an engine loads by itself after it was restarted."""
        self._kept = targets

    def slots(self, name: str) -> int | None:
        """Return the number of calls that the engines sample together, ``None`` if unknown."""
        found = [one.client.slots(name) for one in self._holders(name)]
        known = [slots for slots in found if slots is not None]
        return sum(known) if known and len(known) == len(found) else None

    async def policies(self) -> frozenset[str]:
        """Return the names of the policies that an engine holds; the others load them again.

        Raises:
            EngineDownError: no engine answers.
        """
        if len(self.members) == 1:
            self.members[0].held = held = await self.members[0].client.policies()
            self.members[0].down.clear()
            return held
        await asyncio.gather(*(member.look() for member in self.members))
        up = [member for member in self.members if not member.down.is_set()]
        if not up:
            urls = ", ".join(member.client.url for member in self.members)
            raise EngineDownError(f"none of the engines at {urls} answers: look at their logs")
        held = frozenset[str]().union(*(member.held for member in up))
        for member in up:
            missing = [one for one in self._kept if one.name in held - member.held]
            if missing and (member.loading is None or member.loading.done()):
                member.loading = asyncio.create_task(_catch_up(member, missing))
        return held

    async def load(self, target: Target) -> None:
        """Load a policy on every engine that answers.

        Returns when half of them have it, and the others too or ``FOLLOW_S`` have passed. These
        get no calls for it until they have it.

        Raises:
            ServingError: fewer than half loaded it; the first refusal.
        """
        up = [member for member in self.members if not member.down.is_set()] or self.members
        loads = [asyncio.create_task(member.load(target)) for member in up]
        try:
            await _half(loads)
            if len(loads) > 1:
                await asyncio.wait(loads, timeout=FOLLOW_S)
        finally:
            for load in loads:
                load.add_done_callback(_quietly)
            if sum(map(_succeeded, loads)) * 2 < len(loads):
                for load in loads:
                    load.cancel()

    async def unload(self, name: str) -> None:
        """Unload a policy wherever it is."""
        for member in self._holders(name) or self.members:
            member.held -= {name}
            await member.client.unload(name)

    async def call_streamed(self, path: str, body: bytes, name: str) -> EngineResponse:
        """Send a call, and return when its first bytes have arrived.

        Until then another engine can answer.

        Raises:
            EngineDownError: no engine answered.
            TimeoutError: no bytes arrived in time.
        """
        return await self._first(lambda one: one.client.call_streamed(path, body, name), body, name)

    async def call(self, path: str, body: bytes, name: str) -> EngineResponse:
        """Send a call for the policy ``name``; the caller closes the response.

        Raises:
            EngineDownError: no engine answered.
        """
        return await self._first(lambda one: one.client.call(path, body, name), body, name)

    async def probe(self, name: str) -> None:
        """Ask the policy ``name`` for one token, at any engine that holds it.

        Raises:
            EngineDownError: none answers, or each with an error of its own (5xx) or 404.
        """
        problem: EngineDownError | None = None
        for member in self._holders(name) or self.members:
            try:
                return await member.client.probe(name)
            except EngineDownError as error:
                problem = error
                if len(self.members) > 1:
                    member.fail(error)
        assert problem is not None
        raise problem

    async def _first(
        self,
        send: Callable[[Member], Coroutine[None, None, EngineResponse]],
        body: bytes,
        name: str,
    ) -> EngineResponse:
        """Send a call to one engine after the other until one begins to answer."""
        candidates = in_order(self._holders(name) or self.members, body)[:TRIES]
        for last, member in zip([*[False] * (len(candidates) - 1), True], candidates, strict=True):
            member.running += 1
            try:
                response = await (send(member) if last else _unless_down(member, send(member)))
            except BaseException as error:
                member.running -= 1
                if isinstance(error, EngineDownError) and len(self.members) > 1:
                    member.call_failed()
                if last or not isinstance(error, EngineDownError):
                    raise
                continue
            response.ended = partial(_ended, member)
            member.failed = 0
            if last or response.status not in _TRY_ELSEWHERE:
                return response
            if response.status == 404:  # it was restarted
                member.held -= {name}
            async with response:
                continue
        raise AssertionError("there is always a last candidate")

    def _holders(self, name: str) -> list[Member]:
        return [one for one in self.members if name in one.held and not one.down.is_set()]


def in_order(members: Sequence[Member], body: bytes) -> list[Member]:
    """Return the members in the order in which a call tries them.

    Rendezvous hashing of the request's beginning: each engine keeps its conversations when another
    one comes or goes. Bounded loads: https://arxiv.org/abs/1608.01350.
    """
    if len(members) == 1:
        return [*members]
    beginning = body[:PREFIX_BYTES]
    ranked = sorted(
        members,
        key=lambda one: blake2b(one.client.url.encode() + beginning, digest_size=8).digest(),
    )
    most = SLACK * sum(one.running for one in members) / len(members) + 1
    free = [one for one in ranked if one.running <= most]
    return [*free, *(one for one in ranked if one not in free)]


async def _unless_down(
    member: Member, sending: Coroutine[None, None, EngineResponse]
) -> EngineResponse:
    """Await an answer. Raise ``EngineDownError`` if the engine falls silent meanwhile."""
    call, silent = asyncio.create_task(sending), asyncio.create_task(member.down.wait())
    try:
        await asyncio.wait([call, silent], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise EngineDownError(f"the engine at {member.client.url} fell silent: try again")
        return call.result()
    except BaseException:  # the answer may have come in the moment in which the client left
        call.cancel()
        with suppress(asyncio.CancelledError, ServingError, OSError):
            (await call).close()
        raise
    finally:
        silent.cancel()


def _ended(member: Member) -> None:
    member.running -= 1


async def _half(loads: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until half of the loads succeeded.

    Raises:
        ServingError: that cannot happen any more; the first refusal, else the first error.
    """
    waiting = set(loads)
    while sum(map(_succeeded, loads)) * 2 < len(loads):
        failed = [error for one in loads if one.done() and (error := one.exception())]
        if not waiting or len(failed) * 2 > len(loads):
            refusals = [one for one in failed if not isinstance(one, EngineDownError)]
            raise (refusals or failed)[0]
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


def _succeeded(load: "asyncio.Task[None]") -> bool:
    return load.done() and not load.cancelled() and load.exception() is None


def _quietly(load: "asyncio.Task[None]") -> None:
    if not load.cancelled() and (error := load.exception()):
        log.warning("an engine did not load a policy: %s", error)


async def _catch_up(member: Member, missing: Sequence[Target]) -> None:
    for target in missing:
        try:
            await member.load(target)
        except ServingError as error:
            log.warning("%s is not loaded at %s: %s", target.name, member.client.url, error)
            return
        log.info("%s is loaded at %s again", target.name, member.client.url)

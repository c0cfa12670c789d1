"""Limits on concurrent calls of a policy version, with a queue that is fair between keys.

Where calls wait, the keys take turns: each free slot goes to the next key's longest waiting call.
So a key's single call waits for one slot, however many calls another key has sent. In a full
queue, the key with the most waiting calls gives up its newest for a key that has fewer.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from types import TracebackType
from weakref import WeakValueDictionary

from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.openai_wire import RequestError

QUEUE_WAIT_S = 300.0  # half of what the official clients wait for an answer
_Turn = asyncio.Future[bool]  # True: a slot; False: sent away, because the queue is full


class _Slots:
    """The slots of one version, and the calls that wait for them: by key, in the order of turns.

    ``most``: number of slots, which changes when an engine comes or goes.
    """

    def __init__(self) -> None:
        self.taken = self.most = 0
        self.waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()

    def hand_out(self) -> None:
        """Give the free slots to the calls that wait for them."""
        while self.taken < self.most and (turn := self._next()):
            self.taken += 1
            turn.set_result(True)

    def _next(self) -> _Turn | None:
        """Take the call whose turn it is out of the queue; its key's other calls go behind."""
        while self.waiting:
            key, turns = self.waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self.waiting[key] = turns
            if not turn.done():
                return turn
        return None

    def leave(self, key: str, turn: _Turn) -> None:
        """Take a call that waits no more out of the queue, if it is still there."""
        if (turns := self.waiting.get(key)) and turn in turns:
            turns.remove(turn)
            if not turns:
                del self.waiting[key]


class CallLimits:
    """``concurrency``: calls of one version at a time; ``queue``: waiting calls of all versions;
    ``keys``: the limits of each key."""

    def __init__(self, concurrency: int, queue: int, keys: KeyLimits) -> None:
        self.keys = keys
        self._concurrency, self._queue = concurrency, queue
        # Those of a policy without a call are gone: every window may bring a policy.
        self._slots = WeakValueDictionary[str, _Slots]()

    @property
    def waiting(self) -> int:
        """Number of waiting calls."""
        return sum(len(turns) for one in self._slots.values() for turns in one.waiting.values())

    def for_version(self, name: str, key: str, engine_slots: int | None = None) -> "_Place":
        """Return a context that waits for a slot of the policy ``name`` and holds it.

        Args:
            engine_slots: calls of a policy that its engine samples at a time. More would wait
                there, first come, first served.

        Raises:
            RequestError: 503, at entry: the queue is full, or no slot was free within
                ``QUEUE_WAIT_S``.
        """
        slots = self._slots.get(name)
        if slots is None:
            slots = self._slots[name] = _Slots()
        slots.most = min(self._concurrency, engine_slots or self._concurrency)
        slots.hand_out()  # those of an engine that came meanwhile
        return _Place(self, slots, key)

    async def _queued(self, slots: _Slots, key: str) -> None:
        """Wait for a turn, which takes a slot."""
        if self.waiting >= self._queue:
            self._make_room(key)
        turn: _Turn = asyncio.get_running_loop().create_future()
        slots.waiting.setdefault(key, deque()).append(turn)
        try:
            async with asyncio.timeout(QUEUE_WAIT_S):
                admitted = await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            slots.leave(key, turn)
            if turn.done() and not turn.cancelled() and turn.result():
                self._free(slots)  # its turn came in the same moment
            if isinstance(error, TimeoutError):
                raise RequestError(
                    503, f"no free slot after {QUEUE_WAIT_S:.0f} s: try again", code="busy"
                ) from error
            raise
        if not admitted:
            raise self._full()

    def _make_room(self, key: str) -> None:
        """Send a call of the key with the most waiting calls away, or raise for this one."""
        counts = Counter[str]()
        for slots in self._slots.values():
            counts.update({one: len(turns) for one, turns in slots.waiting.items()})
        longest, most = max(counts.items(), key=lambda one: one[1], default=(key, 0))
        if most <= counts[key] + 1:
            raise self._full()
        slots = next(one for one in self._slots.values() if longest in one.waiting)
        turn = slots.waiting[longest][-1]
        slots.leave(longest, turn)
        if not turn.done():
            turn.set_result(False)

    def _full(self) -> RequestError:
        return RequestError(503, f"{self._queue} calls are waiting: try again", code="busy")

    def _free(self, slots: _Slots) -> None:
        slots.taken -= 1
        slots.hand_out()


class _Place:
    """One call's slot. A class, because a generator's context costs a call without waiting more."""

    __slots__ = ("_key", "_limits", "_slots")

    def __init__(self, limits: CallLimits, slots: _Slots, key: str) -> None:
        self._limits, self._slots, self._key = limits, slots, key

    async def __aenter__(self) -> None:
        if self._slots.taken < self._slots.most:
            self._slots.taken += 1
        else:
            await self._limits._queued(self._slots, self._key)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._limits._free(self._slots)

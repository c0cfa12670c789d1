"""Limits on concurrent calls of a policy version, with a queue that is fair between keys.

Where calls wait, the keys take turns: each free slot goes to the next key's longest waiting call.
So a key's single call waits for one slot, however many calls another key has sent. A call of
several answers takes a slot and a turn for each, because each is a row of the engine. In a full
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
_Waiting = tuple[_Turn, int]  # and the number of the call's answers


class _Slots:
    """The slots of one version, and the calls that wait for them: by key, in the order of turns.

    ``most``: number of slots, which changes when an engine comes or goes. The last call may take
    more. ``due``: the round of a key's next turn.
    """

    def __init__(self) -> None:
        self.taken = self.most = self.round = 0
        self.waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self.due = Counter[str]()

    def hand_out(self) -> None:
        """Give the free slots to the calls that wait for them."""
        while self.taken < self.most and (called := self._next()):
            turn, answers = called
            self.taken += answers
            turn.set_result(True)

    def _next(self) -> _Waiting | None:
        """Take the call whose turn it is out of the queue; its key's other calls go behind."""
        while self.waiting:
            key = min(self.waiting, key=lambda one: max(self.round, self.due[one]))
            turns = self.waiting.pop(key)
            turn, answers = turns.popleft()
            if turns:
                self.waiting[key] = turns
            if not turn.done():
                self.round = max(self.round, self.due[key])
                self.due[key] = self.round + answers
                return turn, answers
        return None

    def leave(self, key: str, call: _Waiting) -> None:
        """Take a call that waits no more out of the queue, if it is still there."""
        if (turns := self.waiting.get(key)) and call in turns:
            turns.remove(call)
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

    def for_version(
        self, name: str, key: str, engine_slots: int | None = None, answers: int = 1
    ) -> "_Place":
        """Return a context that waits for a slot of the policy ``name`` and holds it.

        Args:
            engine_slots: answers of a policy that its engine samples at a time. More would wait
                there, first come, first served.
            answers: slots that the call holds.

        Raises:
            RequestError: 503, at entry: the queue is full, or no slot was free within
                ``QUEUE_WAIT_S``.
        """
        slots = self._slots.get(name)
        if slots is None:
            slots = self._slots[name] = _Slots()
        slots.most = min(self._concurrency, engine_slots or self._concurrency)
        slots.hand_out()  # those of an engine that came meanwhile
        return _Place(self, slots, key, answers)

    async def _queued(self, slots: _Slots, key: str, answers: int) -> None:
        """Wait for a turn, which takes a slot."""
        if self.waiting >= self._queue:
            self._make_room(key)
        turn: _Turn = asyncio.get_running_loop().create_future()
        slots.waiting.setdefault(key, deque()).append((turn, answers))
        try:
            async with asyncio.timeout(QUEUE_WAIT_S):
                admitted = await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            slots.leave(key, (turn, answers))
            if turn.done() and not turn.cancelled() and turn.result():
                self._free(slots, answers)  # its turn came in the same moment
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
        turn, answers = slots.waiting[longest][-1]
        slots.leave(longest, (turn, answers))
        if not turn.done():
            turn.set_result(False)

    def _full(self) -> RequestError:
        return RequestError(503, f"{self._queue} calls are waiting: try again", code="busy")

    def _free(self, slots: _Slots, answers: int) -> None:
        slots.taken -= answers
        slots.hand_out()


class _Place:
    """One call's slot. A class, because a generator's context costs a call without waiting more."""

    __slots__ = ("_answers", "_key", "_limits", "_slots")

    def __init__(self, limits: CallLimits, slots: _Slots, key: str, answers: int) -> None:
        self._limits, self._slots, self._key, self._answers = limits, slots, key, answers

    async def __aenter__(self) -> None:
        if self._slots.taken < self._slots.most:
            self._slots.taken += self._answers
        else:
            await self._limits._queued(self._slots, self._key, self._answers)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._limits._free(self._slots, self._answers)

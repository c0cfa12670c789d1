import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.serving.gateway import key_limits
from babylon.serving.gateway import limits as limits_module
from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.exchange import Exchange
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.limits import CallLimits
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.key_usage import KeyUsage

NO_KEYS = KeyLimits(cast(Store, None), "test")


async def test_calls_of_a_version_wait_in_order_and_those_beyond_the_queue_are_sent_away() -> None:
    limits, order, leave = CallLimits(1, 2, NO_KEYS), list[int](), asyncio.Event()

    async def call(number: int) -> None:
        async with limits.for_version("v1", "k"):
            order.append(number)
            await leave.wait()

    calls = [asyncio.create_task(call(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert (order, limits.waiting) == ([0], 2)
    with pytest.raises(RequestError, match="2 calls are waiting") as caught:
        await call(3)
    assert caught.value.status == 503
    async with limits.for_version("v2", "k"):  # another version has places of its own
        leave.set()
    await asyncio.gather(*calls)
    assert (order, limits.waiting) == ([0, 1, 2], 0)


async def test_a_waiting_call_that_is_cancelled_leaves_the_queue() -> None:
    limits = CallLimits(1, 1, NO_KEYS)
    async with limits.for_version("v1", "k"):
        waiting = asyncio.create_task(limits.for_version("v1", "k").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert limits.waiting == 0
    async with limits.for_version("v1", "k"):
        pass


async def test_versions_without_a_call_take_no_memory() -> None:
    limits = CallLimits(1, 1, NO_KEYS)
    async with limits.for_version("v0", "k"):
        for number in range(1, 100):
            async with limits.for_version(f"v{number}", "k"):
                pass
        assert [*limits._slots] == ["v0"]


@pytest.mark.parametrize("end", ["cancelled", "overdue"])
async def test_a_slot_that_comes_in_the_moment_of_the_end_is_not_lost(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = CallLimits(1, 9, NO_KEYS)
    monkeypatch.setattr(limits_module, "QUEUE_WAIT_S", 0.0 if end == "overdue" else 60)
    async with limits.for_version("v1", "k"):
        waiting = asyncio.create_task(limits.for_version("v1", "k").__aenter__())
        await asyncio.sleep(0)
        assert limits.waiting == 1
    if end == "cancelled":
        waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() or isinstance(waiting.exception(), RequestError)
    assert limits.for_version("v1", "k")._slots.taken == 0


async def test_the_engines_own_number_of_slots_counts_if_it_is_smaller() -> None:
    limits = CallLimits(9, 9, NO_KEYS)
    async with limits.for_version("v1", "k", 1):
        waiting = asyncio.create_task(limits.for_version("v1", "k", 1).__aenter__())
        await asyncio.sleep(0)
        assert limits.waiting == 1
    await waiting


async def test_slots_of_a_new_engine_go_to_the_calls_that_wait_the_longest() -> None:
    limits, order, leave = CallLimits(9, 9, NO_KEYS), list[int](), asyncio.Event()

    async def call(number: int, engine_slots: int) -> None:
        async with limits.for_version("v1", "k", engine_slots):
            order.append(number)
            await leave.wait()

    calls = [asyncio.create_task(call(number, 1)) for number in range(3)]
    await asyncio.sleep(0)
    calls.append(asyncio.create_task(call(3, 2)))
    await asyncio.sleep(0.01)
    assert (order, limits.waiting) == ([0, 1], 2)
    leave.set()
    await asyncio.gather(*calls)
    assert order == [0, 1, 2, 3]


async def test_slots_of_an_engine_that_left_are_given_to_nobody() -> None:
    limits = CallLimits(9, 9, NO_KEYS)
    first, second = (limits.for_version("v1", "k", 2) for _ in range(2))
    await first.__aenter__()
    await second.__aenter__()
    waiting = asyncio.create_task(limits.for_version("v1", "k", 1).__aenter__())
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)
    await asyncio.sleep(0)
    assert limits.waiting == 1
    await second.__aexit__(None, None, None)
    await waiting


async def served(arrivals: list[str], slots: int) -> list[str]:
    """The keys in the order in which their calls get a slot; one call ends after the other."""
    limits, order, running = CallLimits(slots, len(arrivals), NO_KEYS), [], list[asyncio.Event]()

    async def call(key: str) -> None:
        async with limits.for_version("v1", key):
            order.append(key)
            running.append(ended := asyncio.Event())
            await ended.wait()

    calls = [asyncio.create_task(call(key)) for key in arrivals]
    await asyncio.sleep(0)
    while running:
        running.pop(0).set()
        for _ in range(3):  # until the slot is handed over
            await asyncio.sleep(0)
    await asyncio.gather(*calls)
    return order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.integers(1, 4))
def test_a_waiting_key_is_passed_at_most_once_by_each_other_key(
    arrivals: list[str], slots: int
) -> None:
    order = asyncio.run(served(arrivals, slots))
    assert Counter(order) == Counter(arrivals)
    assert order[:slots] == arrivals[:slots]  # who finds a free slot does not wait
    waiting = order[slots:]
    for key in set(waiting):
        turns = [place for place, one in enumerate(waiting) if one == key]
        for before, after in zip([-1, *turns], turns, strict=False):
            passed = Counter(waiting[before + 1 : after])
            assert max(passed.values(), default=0) <= 1, (key, order)


async def test_a_hundred_calls_of_one_key_hold_up_anothers_for_one_turn() -> None:
    order = await served(["many"] * 101 + ["one"], slots=1)
    assert order.index("one") == 2  # after the one that runs, and one turn


async def test_a_call_of_several_answers_takes_a_slot_and_a_turn_for_each() -> None:
    limits, order, leave = CallLimits(4, 99, NO_KEYS), list[str](), asyncio.Event()

    async def call(key: str, answers: int) -> None:
        async with limits.for_version("v1", key, None, answers):
            order.append(key)
            await leave.wait()

    large = [asyncio.create_task(call("large", 4)) for _ in range(3)]
    small = [asyncio.create_task(call("small", 1)) for _ in range(9)]
    await asyncio.sleep(0)
    assert order == ["large"]  # more would wait in the engine, before the calls of other keys
    leave.set()
    await asyncio.gather(*large, *small)
    waited = order[1:]
    assert waited.count("large") == 2
    places = [place for place, key in enumerate(waited) if key == "large"]
    assert waited[places[0] + 1 : places[1]].count("small") == 4
    assert limits.for_version("v1", "k")._slots.taken == 0


async def test_a_full_queue_makes_room_for_a_key_with_fewer_waiting_calls() -> None:
    limits = CallLimits(1, 4, NO_KEYS)
    async with limits.for_version("v1", "many"):
        many = [
            asyncio.create_task(limits.for_version("v1", "many").__aenter__()) for _ in range(4)
        ]
        await asyncio.sleep(0)
        few = [asyncio.create_task(limits.for_version("v1", "few").__aenter__()) for _ in range(3)]
        await asyncio.sleep(0.01)
        refused = [task for task in (*many, *few) if task.done()]
        assert refused == [many[2], many[3], few[2]]
        for task in refused:
            with pytest.raises(RequestError, match="4 calls are waiting"):
                await task
        assert limits.waiting == 4
        for task in (*many[:2], *few[:2]):
            task.cancel()
        await asyncio.wait([*many, *few])
    assert limits.waiting == 0


def key_with(**limits: int) -> Principal:
    return Principal(key_id="k", digest=b"", scopes=frozenset(), **limits)  # type: ignore[arg-type]


@pytest.fixture
def one_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limits, "_minute", lambda: 7)


@pytest.mark.usefixtures("one_minute")
def test_the_tokens_of_all_choices_count_for_the_key() -> None:
    limits = KeyLimits(cast(Store, None), "test")
    key = key_with(tokens_per_minute=30)
    said = SimpleNamespace(key_id="k", used=(4, 32))
    with limits.admitted(key):
        limits.spend(cast(Exchange, said))
    with pytest.raises(RequestError, match="has 36 tokens"), limits.admitted(key):
        pass


@pytest.mark.usefixtures("one_minute")
def test_a_request_that_is_no_call_takes_neither_tokens_nor_a_place() -> None:
    limits = KeyLimits(cast(Store, None), "test")
    key = key_with(requests_per_minute=3, max_concurrency=1, tokens_per_minute=1)
    with limits.admitted(key):
        limits.count_request(key)
        limits.count_request(key)
        with pytest.raises(RequestError, match="has 3 requests in this minute") as caught:
            limits.count_request(key)
    assert 1 <= caught.value.retry_after_s <= 60


async def test_a_key_that_rested_has_its_whole_limit_unless_the_database_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, limits = [0.0], KeyLimits(cast(Store, None), "test")
    key = key_with(requests_per_minute=8)
    now = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0])
    monkeypatch.setattr(key_limits, "time", now)
    monkeypatch.setattr(key_limits, "EXCHANGE_S", 0.0)
    monkeypatch.setattr(key_limits, "exchange_usage", AsyncMock(return_value={}))
    monkeypatch.setattr(key_limits, "live_gateway_count", AsyncMock(return_value=4))
    running = asyncio.create_task(limits.run())
    limits.count_request(key)
    for rest_s in (1, 60, 3600):  # exchanges, until there is nothing to tell any more
        for _ in range(20):
            await asyncio.sleep(0)
        clock[0] += rest_s
    for _ in range(8):
        limits.count_request(key)
    with pytest.raises(RequestError, match="has 8 requests"):
        limits.count_request(key)
    clock[0] += 60  # and the database took nothing
    for _ in range(2):
        limits.count_request(key)
    with pytest.raises(RequestError, match="has 2 requests"):
        limits.count_request(key)
    running.cancel()


async def test_running_calls_are_told_again_after_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, KeyUsage]] = []
    back = asyncio.Event()

    async def exchange(store: Store, gateway_id: str, own: dict[str, KeyUsage]) -> dict[str, Any]:
        told.append(own)
        if len(told) == 1:
            raise OSError("the database is away")
        back.set()
        return {}

    monkeypatch.setattr(key_limits, "EXCHANGE_S", 0.0)
    monkeypatch.setattr(key_limits, "exchange_usage", exchange)
    monkeypatch.setattr(key_limits, "live_gateway_count", AsyncMock(return_value=1))
    limits = KeyLimits(cast(Store, None), "test")
    running = asyncio.create_task(limits.run())
    with limits.admitted(key_with(max_concurrency=1)):
        async with asyncio.timeout(20):
            await back.wait()  # nothing else is called meanwhile
    assert [own["k"].running for own in told[:2]] == [1, 1]
    running.cancel()

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.exchange import Exchange
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.limits import CallLimits
from babylon.serving.openai_wire import RequestError
from babylon.store import Store

NO_KEYS = KeyLimits(cast(Store, None), "test")


async def test_calls_of_a_version_wait_in_order_and_those_beyond_the_queue_are_sent_away() -> None:
    limits, order, leave = CallLimits(1, 2, NO_KEYS), list[int](), asyncio.Event()

    async def call(number: int) -> None:
        async with limits.for_version("v1"):
            order.append(number)
            await leave.wait()

    calls = [asyncio.create_task(call(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert (order, limits.waiting) == ([0], 2)
    with pytest.raises(RequestError, match="2 calls are waiting") as caught:
        await call(3)
    assert caught.value.status == 503
    async with limits.for_version("v2"):  # another version has places of its own
        leave.set()
    await asyncio.gather(*calls)
    assert (order, limits.waiting) == ([0, 1, 2], 0)


async def test_a_waiting_call_that_is_cancelled_leaves_the_queue() -> None:
    limits = CallLimits(1, 1, NO_KEYS)
    async with limits.for_version("v1"):
        waiting = asyncio.create_task(limits.for_version("v1").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert limits.waiting == 0
    async with limits.for_version("v1"):
        pass


def test_the_tokens_of_all_choices_count_for_the_key() -> None:
    limits = KeyLimits(cast(Store, None), "test")
    key = Principal(key_id="k", digest=b"", scopes=frozenset(), tokens_per_minute=30)
    said = SimpleNamespace(
        key_id="k", prompt_token_ids=[1] * 4, token_ids=[2] * 8, completion_tokens=32
    )
    with limits.admitted(key):
        limits.spend(cast(Exchange, said))
    with pytest.raises(RequestError, match="has 36 tokens"), limits.admitted(key):
        pass

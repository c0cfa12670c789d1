import asyncio

import pytest

from babylon.serving.gateway.asgi import Client, ClientLeft, unless_client_leaves


async def test_work_ends_when_its_client_leaves_or_its_time_is_over() -> None:
    client, ended = Client(), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    asyncio.get_running_loop().call_later(0.01, client.leave)
    with pytest.raises(ClientLeft):
        await unless_client_leaves(client, work(), 60)
    with pytest.raises(TimeoutError):
        await unless_client_leaves(Client(), work(), 0.01)
    assert ended == ["work", "work"]


async def test_work_does_not_begin_for_a_client_that_has_left() -> None:
    client = Client()
    client.leave()

    async def work() -> None:
        raise AssertionError

    with pytest.raises(ClientLeft):
        await unless_client_leaves(client, work(), 60)


async def test_a_client_that_leaves_later_stops_nothing() -> None:
    client = Client()
    await unless_client_leaves(client, asyncio.sleep(0), 60)
    client.leave()
    await asyncio.sleep(0)
    assert client.on_leaving == set()


async def test_a_cancellation_by_others_is_none_of_the_client() -> None:
    running = asyncio.create_task(unless_client_leaves(Client(), asyncio.sleep(60), 60))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

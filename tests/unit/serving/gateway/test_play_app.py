"""The events of many keys beside each other."""

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import httpx

from babylon.serving.gateway.auth import KeyRing, Principal
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.play.app import AT_A_TIME, play_app
from babylon.serving.gateway.play.events import Event, EventResult, StepEvent
from babylon.serving.gateway.play.handler import PlayHandler
from babylon.store import Store


class _Keys:
    def admit(self, headers: Iterable[tuple[bytes, bytes]], *scopes: str) -> Principal:
        return Principal(
            key_id=dict(headers)[b"authorization"].decode(), digest=b"", scopes=frozenset(scopes)
        )


class _SlowForOne:
    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def apply(self, caller: Principal, event: Event) -> EventResult:
        if caller.key_id == "slow":
            await self.over.wait()
        return EventResult()


async def test_a_key_whose_events_wait_does_not_hold_up_other_keys() -> None:
    handler = _SlowForOne()
    app = play_app(
        cast(PlayHandler, handler), cast(KeyRing, _Keys()), KeyLimits(cast(Store, None), "test")
    )
    events: dict[str, Any] = {"events": [{"type": "start", "trajectory_id": "t"}]}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://gateway"
    ) as http:

        def send(key: str) -> Any:
            return http.post("/v1/events", json=events, headers={"authorization": key})

        waiting = [asyncio.create_task(send("slow")) for _ in range(2 * AT_A_TIME)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            assert (await send("quick")).status_code == 200
        handler.over.set()
        assert {(await one).status_code for one in waiting} == {200}


def test_the_schema_tells_the_bounds_of_a_step_number_in_json_schemas_words() -> None:
    number = StepEvent.model_json_schema()["properties"]["number"]
    assert (number["minimum"], number["exclusiveMaximum"]) == (0, 2**31)

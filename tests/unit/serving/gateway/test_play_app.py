"""The events of many keys beside each other."""

import asyncio
import threading
from collections.abc import Iterable
from typing import Any, cast

import httpx
import pytest

from babylon.serving.gateway.auth import KeyRing, Principal
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.play import app as app_module
from babylon.serving.gateway.play.app import AT_A_TIME, OF_A_KEY, play_app
from babylon.serving.gateway.play.events import MAX_STEPS, Event, EventResult, StepEvent
from babylon.serving.gateway.play.handler import PlayHandler
from babylon.store import Store


class _Keys:
    def admit(self, headers: Iterable[tuple[bytes, bytes]], *scopes: str) -> Principal:
        return Principal(
            key_id=dict(headers)[b"authorization"].decode(), digest=b"", scopes=frozenset(scopes)
        )


class _SlowForOne:
    def __init__(self, *slow: str) -> None:
        self.over, self._slow = asyncio.Event(), slow

    async def apply(self, caller: Principal, event: Event) -> EventResult:
        if caller.key_id in self._slow:
            await self.over.wait()
        return EventResult()


def client(handler: _SlowForOne) -> httpx.AsyncClient:
    limits = KeyLimits(cast(Store, None), "test")
    app = play_app(cast(PlayHandler, handler), cast(KeyRing, _Keys()), limits)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def test_a_key_whose_events_wait_does_not_hold_up_other_keys() -> None:
    handler = _SlowForOne("slow")
    events: dict[str, Any] = {"events": [{"type": "start", "trajectory_id": "t"}]}
    async with client(handler) as http:

        def send(key: str) -> Any:
            return http.post("/v1/events", json=events, headers={"authorization": key})

        waiting = [asyncio.create_task(send("slow")) for _ in range(2 * AT_A_TIME)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            assert (await send("quick")).status_code == 200
        handler.over.set()
        assert {(await one).status_code for one in waiting} == {200}


async def test_a_request_waits_for_its_place_before_its_body_is_read_and_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, decoded, checked = [], [], []
    read_body, decode, check = app_module.read_body, app_module._decoded, app_module._checked

    async def reading(*args: Any) -> bytes:
        read.append(args)
        return await read_body(*args)

    def decoding(body: bytes) -> object:
        decoded.append(threading.current_thread())
        return decode(body)

    def checking(raw: object) -> Event:
        checked.append(threading.current_thread())
        return check(raw)

    monkeypatch.setattr(app_module, "read_body", reading)
    monkeypatch.setattr(app_module, "_decoded", decoding)
    monkeypatch.setattr(app_module, "_checked", checking)
    handler = _SlowForOne("slow", "as slow")
    events: dict[str, Any] = {"events": [{"type": "start", "trajectory_id": "t"}]}
    async with client(handler) as http:
        waiting = [
            asyncio.create_task(
                http.post("/v1/events", json=events, headers={"authorization": key})
            )
            for key in ("slow", "as slow")
            for _ in range(2 * AT_A_TIME)
        ]
        async with asyncio.timeout(10):
            while len(checked) < AT_A_TIME:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(read) == 2 * OF_A_KEY and len(decoded) == len(checked) == AT_A_TIME
        assert threading.main_thread() not in {*decoded, *checked}
        handler.over.set()
        assert {(await one).status_code for one in waiting} == {200}


def test_the_schema_tells_the_bounds_of_a_step_number_in_json_schemas_words() -> None:
    number = StepEvent.model_json_schema()["properties"]["number"]
    assert (number["minimum"], number["exclusiveMaximum"]) == (0, MAX_STEPS)

"""Clients of play repeat events that a gateway did not take."""

from types import SimpleNamespace

import httpx
import pytest

from babylon.recorder import AsyncPlayClient, PlayClient, PlayRefusedError
from babylon.recorder import client as module

EVENT: dict[str, object] = {"type": "start", "trajectory_id": "t"}
REFUSED = {"error": {"message": "wait"}, "results": []}


def gateway(*answers: tuple[int, dict[str, str]]) -> httpx.MockTransport:
    """A gateway that gives these statuses and headers, then takes everything."""
    left = [*answers]

    def answer(request: httpx.Request) -> httpx.Response:
        if left:
            status, headers = left.pop(0)
            return httpx.Response(status, headers=headers, json=REFUSED)
        return httpx.Response(200, json={"results": [{"status": 200}]})

    return httpx.MockTransport(answer)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    # In the client alone: threads of other tests sleep too.
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    return waits


ANSWERS = [
    (429, {"retry-after": "41"}),  # the minute of the key's limit ends then
    (503, {"retry-after": "1"}),
    (429, {"retry-after": "soon"}),
]
WAITS = [41, module.PAUSES_S[1], module.PAUSES_S[2]]


def test_a_limit_of_requests_is_waited_for_as_the_gateway_asks(slept: list[float]) -> None:
    with PlayClient("http://gateway", "key") as client:
        client._http = httpx.Client(base_url="http://gateway", transport=gateway(*ANSWERS))
        assert client.send(EVENT) == [{"status": 200}]
    assert slept == WAITS


async def test_the_client_for_asyncio_waits_alike(slept: list[float]) -> None:
    transport = gateway(*ANSWERS)
    async with AsyncPlayClient("http://gateway", "key") as client:
        client._http = httpx.AsyncClient(base_url="http://gateway", transport=transport)
        assert await client.send(EVENT) == [{"status": 200}]
    assert slept == WAITS


def test_headers_name_any_agent_in_ascii() -> None:
    with PlayClient("http://gateway", "key") as client:
        for name, sent in (
            ("agent 7%", "agent 7%"),
            ("José", "utf-8''Jos%C3%A9"),
            ("two\nlines", "utf-8''two%0Alines"),
            (" blanks ", "utf-8''%20blanks%20"),
        ):
            headers = httpx.Headers(client.trajectory(name, trajectory_id=name).headers)
            assert headers["x-babylon-agent"] == headers["x-babylon-trajectory"] == sent


def test_what_is_refused_for_good_is_not_sent_again(slept: list[float]) -> None:
    with PlayClient("http://gateway", "key") as client:
        client._http = httpx.Client(base_url="http://gateway", transport=gateway((409, {})))
        with pytest.raises(PlayRefusedError, match="wait"):
            client.send(EVENT)
    assert slept == []


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b"null", b"<html>"])
def test_an_answer_of_another_server_is_an_error(body: bytes) -> None:
    other = httpx.MockTransport(lambda request: httpx.Response(404, content=body))
    with PlayClient("http://gateway", "key") as client:
        client._http = httpx.Client(base_url="http://gateway", transport=other)
        with pytest.raises(PlayRefusedError, match="status 404, no answer of a gateway"):
            client.send(EVENT)

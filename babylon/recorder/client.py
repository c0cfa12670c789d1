"""The recorder over HTTP: an agent needs the endpoint, a key and nothing else.

    with PlayClient("http://localhost:8000", key) as client:
        with client.trajectory("agent-7") as play:
            answer = openai.chat.completions.create(..., extra_headers=play.headers)
            play.step(calls=[answer.id], reward=1.0)

The block's end finishes the trajectory. A block that ends in an error leaves it unfinished, and it
is never trained. Events may be repeated, so a request that is not answered is sent again.
``docs/play.md`` has the fields of each event.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypedDict
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec

from babylon.core.errors import RecorderError

TIMEOUT_S = 60.0
PAUSES_S = (0.1, 0.5, 2.0, 5.0)  # before each repetition
_AGAIN = frozenset({429, 502, 503, 504})
PlayObject = dict[str, object]
Send = Callable[[Sequence[PlayObject]], list[PlayObject]]
AsyncSend = Callable[[Sequence[PlayObject]], Awaitable[list[PlayObject]]]


class PlayRefusedError(RecorderError):
    """The gateway refused an event. ``results`` has the fate of each event that was sent."""

    def __init__(self, message: str, status: int, results: list[PlayObject]) -> None:
        super().__init__(message)
        self.status, self.results = status, results


class _Play:
    """The events of one trajectory."""

    def __init__(
        self,
        agent_id: str | None,
        scenario_id: str | None,
        trajectory_id: str | None,
        at: str | None,
    ) -> None:
        self.trajectory_id = trajectory_id or uuid4().hex
        self.next_step = 0
        self.finished = False
        self._agent_id = agent_id
        self._started = _event(
            "start", self.trajectory_id, agent_id=agent_id, scenario_id=scenario_id, at=at
        )

    @property
    def headers(self) -> dict[str, str]:
        """The headers that tie a call to the next step of this trajectory."""
        agent = {} if self._agent_id is None else {"x-babylon-agent": _ascii(self._agent_id)}
        return {
            **agent,
            "x-babylon-trajectory": _ascii(self.trajectory_id),
            "x-babylon-step": str(self.next_step),
        }

    def _step(self, fields: PlayObject) -> PlayObject:
        return _event("step", self.trajectory_id, number=self.next_step, **fields)

    def _feedback(self, value: float | None, fields: PlayObject) -> PlayObject:
        return _event("feedback", self.trajectory_id, value=value, **fields)


class TrajectoryPlay(_Play):
    """A trajectory that is being recorded."""

    def __init__(self, client: "PlayClient", *about: str | None) -> None:
        super().__init__(*about)
        self._client = client

    def step(self, **fields: object) -> int:
        """Add a step (``calls``, ``state``, ``action``, ``reward``, ``at``); return its number."""
        self._client.send(self._step(fields))
        self.next_step += 1
        return self.next_step - 1

    def feedback(self, value: float | None = None, **fields: object) -> None:
        """Give feedback (``name``, ``step``, ``call_id``, ``label``, ``comment``)."""
        self._client.send(self._feedback(value, fields))

    def finish(self, **fields: object) -> None:
        """End it (``reward``, ``status``, ``final_pnl``, ``knowledge``, ``at``)."""
        self._client.send(_event("finish", self.trajectory_id, **fields))
        self.finished = True

    def __enter__(self) -> Self:
        self._client.send(self._started)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None and not self.finished:
            self.finish()


class AsyncTrajectoryPlay(_Play):
    """A trajectory that is being recorded, for asyncio."""

    def __init__(self, client: "AsyncPlayClient", *about: str | None) -> None:
        super().__init__(*about)
        self._client = client

    async def step(self, **fields: object) -> int:
        """Add a step (``calls``, ``state``, ``action``, ``reward``, ``at``); return its number."""
        await self._client.send(self._step(fields))
        self.next_step += 1
        return self.next_step - 1

    async def feedback(self, value: float | None = None, **fields: object) -> None:
        """Give feedback (``name``, ``step``, ``call_id``, ``label``, ``comment``)."""
        await self._client.send(self._feedback(value, fields))

    async def finish(self, **fields: object) -> None:
        """End it (``reward``, ``status``, ``final_pnl``, ``knowledge``, ``at``)."""
        await self._client.send(_event("finish", self.trajectory_id, **fields))
        self.finished = True

    async def __aenter__(self) -> Self:
        await self._client.send(self._started)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None and not self.finished:
            await self.finish()


class PlayClient:
    """Sends events to a gateway, or by ``send_by`` to a store
    (``babylon.serving.gateway.play.direct.blocking_to_store``).

    ``endpoint`` is the gateway's address, without a path.
    """

    def __init__(self, endpoint: str = "", key: str = "", *, send_by: Send | None = None) -> None:
        self._http = None if send_by else httpx.Client(**_options(endpoint, key))
        self._send_by = send_by

    def trajectory(
        self,
        agent_id: str | None = None,
        scenario_id: str | None = None,
        *,
        trajectory_id: str | None = None,
        at: str | None = None,
    ) -> TrajectoryPlay:
        """Return a trajectory that begins and ends with its block."""
        return TrajectoryPlay(self, agent_id, scenario_id, trajectory_id, at)

    def send(self, *events: PlayObject) -> list[PlayObject]:
        """Send events, up to 200, and return their results.

        Raises:
            PlayRefusedError: an event was refused; the others are stored.
            httpx.HTTPError: the gateway did not answer, several times.
        """
        if self._http is None:
            assert self._send_by is not None
            return _checked(self._send_by(events))
        for pause_s in (*PAUSES_S, None):
            try:
                answer = self._http.post("/v1/events", json={"events": events})
                if pause_s is None or answer.status_code not in _AGAIN:
                    return _results(answer)
                pause_s = max(pause_s, _asked_for(answer))
            except httpx.TransportError:
                if pause_s is None:
                    raise
            time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._http:
            self._http.close()


class AsyncPlayClient:
    """Sends events to a gateway, or by ``send_by`` to a store
    (``babylon.serving.gateway.play.direct.to_store``).
    """

    def __init__(
        self, endpoint: str = "", key: str = "", *, send_by: AsyncSend | None = None
    ) -> None:
        self._http = None if send_by else httpx.AsyncClient(**_options(endpoint, key))
        self._send_by = send_by

    def trajectory(
        self,
        agent_id: str | None = None,
        scenario_id: str | None = None,
        *,
        trajectory_id: str | None = None,
        at: str | None = None,
    ) -> AsyncTrajectoryPlay:
        """Return a trajectory that begins and ends with its block."""
        return AsyncTrajectoryPlay(self, agent_id, scenario_id, trajectory_id, at)

    async def send(self, *events: PlayObject) -> list[PlayObject]:
        """Send events, up to 200, and return their results.

        Raises:
            PlayRefusedError: an event was refused; the others are stored.
            httpx.HTTPError: the gateway did not answer, several times.
        """
        if self._http is None:
            assert self._send_by is not None
            return _checked(await self._send_by(events))
        for pause_s in (*PAUSES_S, None):
            try:
                answer = await self._http.post("/v1/events", json={"events": events})
                if pause_s is None or answer.status_code not in _AGAIN:
                    return _results(answer)
                pause_s = max(pause_s, _asked_for(answer))
            except httpx.TransportError:
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http:
            await self._http.aclose()


class _Options(TypedDict):
    base_url: str
    headers: dict[str, str]
    timeout: float


def _options(endpoint: str, key: str) -> _Options:
    headers = {"authorization": f"Bearer {key}"}
    return {"base_url": endpoint.rstrip("/"), "headers": headers, "timeout": TIMEOUT_S}


def _ascii(value: str) -> str:
    """Return a header's value as it is, or percent-encoded (RFC 8187): clients send ASCII only.

    A line break would be refused, and blanks at the ends would be lost on the way.
    """
    plain = value.isascii() and value.isprintable() and value == value.strip()
    return value if plain else f"utf-8''{quote(value)}"


def _event(kind: str, trajectory_id: str, **fields: object) -> PlayObject:
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": kind, "trajectory_id": trajectory_id, **given}


def _asked_for(answer: httpx.Response) -> int:
    """Return the seconds until a key may send again that has reached its limit of requests."""
    seconds = answer.headers.get("retry-after", "")
    return int(seconds) if answer.status_code == 429 and seconds.isdigit() else 0


class _WireError(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct):
    results: list[PlayObject] | None = None
    error: _WireError | None = None


def _results(answer: httpx.Response) -> list[PlayObject]:
    try:
        read = msgspec.json.decode(answer.content, type=_Answer)
    except msgspec.DecodeError:
        read = _Answer()
    if read.error:
        raise PlayRefusedError(read.error.message, answer.status_code, read.results or [])
    if read.results is None:
        raise PlayRefusedError(
            f"status {answer.status_code}, no answer of a gateway: is the endpoint its address?",
            answer.status_code,
            [],
        )
    return read.results


def _checked(results: list[PlayObject]) -> list[PlayObject]:
    for result in results:
        if result.get("error"):
            status = result["status"]
            assert isinstance(status, int)
            raise PlayRefusedError(str(result["error"]), status, results)
    return results

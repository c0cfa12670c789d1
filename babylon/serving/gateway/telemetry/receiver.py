"""``POST /v1/traces``: spans of agents become steps of their trajectories.

Each span is stored for itself, and may be sent again. A trajectory is a conversation of any number
of traces, or a trace without one. It is finished by an event of play, by the end of its trace, or
after a rest. ``PlayHandler`` makes its steps then.
"""

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from babylon.core.errors import ServingError, reason_of
from babylon.core.text import storable_json
from babylon.formats.otlp import RawSpan, Span, read_span
from babylon.formats.spans import Agents, reader_of
from babylon.formats.trace import ImportFileError
from babylon.quality.decode import is_deep
from babylon.serving.gateway.asgi import Headers, Receive, Response, Scope, read_body
from babylon.serving.gateway.auth import KeyRing, Principal
from babylon.serving.gateway.key_limits import KeyLimits
from babylon.serving.gateway.play.events import MAX_ID, ElsewhereCall, FinishEvent, StepAction
from babylon.serving.gateway.play.handler import PlayHandler
from babylon.serving.gateway.play.span_steps import PlaySpan
from babylon.serving.gateway.recording_rules import UNRECORDED
from babylon.serving.gateway.telemetry.otlp import (
    Encoding,
    accepted,
    encoding_of,
    refused,
    told_spans,
    unpacked,
)
from babylon.serving.openai_wire import RequestError
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.play_spans import StoredSpan, close_spans, ended_trajectories, trajectories_of

log = logging.getLogger(__name__)

PATH = "/v1/traces"
AT_A_TIME = 3  # requests: decoding takes the processor, and storing a connection
OF_A_KEY = 2  # of them: the spans of one key must not hold up those of the others
FINISHES = 4  # at a time: each may hold a connection
LOOK_S = 1.0
REST_S = 600.0  # without a span, after which a trajectory is finished
_UNREADABLE = (ImportFileError, ValidationError, RecursionError, RequestError)
_CONVERSATION = "gen_ai.conversation.id", "session.id"
_IDS = re.compile(r"[0-9a-f]{32} [0-9a-f]{16}")  # of a trace and a span, as OTLP's JSON has them


class TraceReceiver:
    """Stores spans, and finishes their trajectories while ``run`` runs."""

    def __init__(self, store: Store, plays: PlayHandler, keys: KeyRing, limits: KeyLimits) -> None:
        self._store, self._plays, self._keys, self._limits = store, plays, keys, limits
        self._slots, self._finishing = asyncio.Semaphore(AT_A_TIME), asyncio.Semaphore(FINISHES)
        self._of_keys = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(OF_A_KEY))
        self._ending = set[str]()  # trajectories that are being finished

    async def receive(self, scope: Scope, receive: Receive, response: Response) -> None:
        """Answer one request as OTLP says, errors too."""
        encoding: Encoding = "application/json"
        wait_s = 1
        try:
            caller = self._keys.admit(scope["headers"], "record")
            self._limits.count_request(caller)
            encoding = encoding_of(scope["headers"])
            async with self._of_keys[caller.key_id]:  # before its body takes memory
                body = await read_body(scope, receive)
                async with self._slots:
                    answer = await self._store_spans(caller, encoding, scope["headers"], body)
            status = 200
        except RequestError as error:
            status, answer, wait_s = error.status, refused(encoding, error), error.retry_after_s
        except (ServingError, *UNREACHABLE) as error:
            unavailable = RequestError(503, f"{reason_of(error)}: try again")
            status, answer = 503, refused(encoding, unavailable)
        retry: Headers = [(b"retry-after", b"%d" % wait_s)] if status in (429, 503) else []
        close: Headers = [(b"connection", b"close")] if status in (408, 413) else []
        await response.whole(
            answer, content_type=encoding.encode(), status=status, headers=[*retry, *close]
        )

    async def run(self) -> NoReturn:
        """Finish the trajectories that have ended.

        A finish waits for its calls, for seconds. It does not hold up the others.
        """
        async with asyncio.TaskGroup() as finishes:
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    ended = await ended_trajectories(self._store, REST_S)
                except UNREACHABLE as error:  # RouteFollower reports it
                    log.debug("trajectories of spans wait: %r", error)
                    continue
                for trajectory_id, key_id in ended:
                    if trajectory_id not in self._ending:
                        self._ending.add(trajectory_id)
                        finishes.create_task(self._finish(trajectory_id, key_id))

    async def _finish(self, trajectory_id: str, key_id: str) -> None:
        try:
            async with self._finishing:
                await self._finish_one(trajectory_id, key_id)
        except UNREACHABLE as error:
            log.debug("the spans of %r wait: %r", trajectory_id, error)
        finally:
            self._ending.discard(trajectory_id)

    async def _finish_one(self, trajectory_id: str, key_id: str) -> None:
        # A key that was revoked meanwhile has no rights to check any more.
        holder = self._keys.holder_of(key_id)
        caller = holder or Principal(key_id=key_id, digest=b"", scopes=frozenset())
        event = FinishEvent(type="finish", trajectory_id=trajectory_id)
        result = await self._plays.apply(caller, event)
        if result.error and result.status != 503:
            log.warning("the spans of %r make no trajectory: %s", trajectory_id, result.error)
            await close_spans(self._store, trajectory_id)

    async def _store_spans(
        self, caller: Principal, encoding: Encoding, headers: Headers, body: bytes
    ) -> bytes:
        # In a thread: the calls of agents go on meanwhile.
        batch = await asyncio.to_thread(
            lambda: _Batch(caller, told_spans(encoding, unpacked(headers, body)))
        )
        traces = {span.trace_id for span, *_ in batch.told}
        known = await trajectories_of(self._store, caller.key_id, traces)
        rejected, why = batch.rejected, batch.why
        for trajectory_id, spans in batch.by_trajectory(known).items():
            try:
                late = await self._plays.add_spans(caller, trajectory_id, spans)
                problem = f"trajectory {trajectory_id!r:.80} is finished: begin another"
            except RequestError as error:
                late, problem = len(spans), str(error)
            if late:
                rejected, why = rejected + late, why or problem
        return accepted(encoding, rejected, why)


class _Batch:
    """The spans of one request. ``rejected`` ones cannot be stored; ``why`` is about the first."""

    def __init__(self, caller: Principal, raw: Sequence[RawSpan]) -> None:
        self.told: list[tuple[Span, PlaySpan | None, str]] = []  # and the latter as JSON
        self.rejected, self.why = 0, ""
        spans: list[Span] = []
        for one in raw:
            try:
                spans.append(_checked(read_span(one)))
            except _UNREADABLE as error:
                self._reject(one.place, error)
        agents = Agents({(span.trace_id, span.span_id): span for span in spans})
        for span in spans:
            try:
                told = _told(caller, span, agents)
                self.told.append((span, told, _encoded(span, told)))
            except _UNREADABLE as error:
                self._reject(span.place, error)

    def by_trajectory(self, known: Mapping[str, str]) -> dict[str, list[StoredSpan]]:
        """Return the spans to store; ``known`` is the trajectory of traces that came before.

        A trace is in one trajectory as a whole: spans of tools do not name the conversation.
        The first request with a span of the trace decides.
        """
        of_traces = dict(known)
        for span, told, _ in self.told:
            if told and (conversation := _conversation(span)):
                of_traces.setdefault(span.trace_id, conversation)
        playing = {span.trace_id for span, told, _ in self.told if told} | known.keys()
        found: defaultdict[str, list[StoredSpan]] = defaultdict(list)
        for span, _, encoded in self.told:
            if span.trace_id not in playing:  # a trace of something else
                continue
            place = of_traces.get(span.trace_id, span.trace_id)
            stored = StoredSpan(
                trace_id=span.trace_id,
                span_id=span.span_id,
                root=place == span.trace_id and not span.parent_id,
                span=encoded,
            )
            found[place].append(stored)
        return found

    def _reject(self, place: str, error: Exception) -> None:
        self.rejected += 1
        self.why = self.why or _problem(place, error)


def _checked(span: Span) -> Span:
    """Return the span if its ids can be stored.

    Raises:
        One of ``_UNREADABLE``: they cannot.
    """
    if not _IDS.fullmatch(f"{span.trace_id} {span.span_id}"):
        raise ImportFileError(
            f"{span.place}: traceId {span.trace_id!r:.40} and spanId {span.span_id!r:.40}: send 32"
            " and 16 hexadecimal digits"
        )
    conversation = _conversation(span)
    if conversation and not (len(conversation) <= MAX_ID and conversation.isprintable()):
        raise ImportFileError(
            f"{span.place}: {_CONVERSATION[0]} {conversation!r:.40}: send at most {MAX_ID}"
            " printable characters"
        )
    return span


def _told(caller: Principal, span: Span, agents: Agents) -> PlaySpan | None:
    """Return what the span tells, ``None`` if it is of no model, tool or agent.

    Raises:
        One of ``_UNREADABLE``: the call or the agent cannot be stored.
    """
    reader = reader_of(span)
    if reader is None:
        return None
    call_id, call, action = None, None, None
    if reader.is_call(span):
        call_id = span.text("gen_ai.response.id")
        try:
            told = reader.read_call(span)
        except ImportFileError:
            if call_id is None:  # otherwise the gateway may have recorded it
                raise
            told = None
        # What a rule keeps out of the records does not come in here.
        if told and not (call_id or "").startswith(UNRECORDED):
            call = ElsewhereCall(
                messages=list(told.prompt),
                response=told.response or "",
                model=told.model,
                temperature=told.temperature,
                tool_calls=list(told.tool_calls or ()),
            )
    elif reader.is_tool(span):
        run = reader.read_tool(span)
        action = StepAction(
            action_type=run.name,
            success=run.error is None,
            parameters=run.arguments,
            result=run.result,
            error=run.error,
        )
    elif not reader.is_agent(span):  # an embedding, say: without calls it makes no trajectory
        return None
    agent_id = _agent(caller, agents.agent_of(span, reader))
    return PlaySpan(at=span.start, agent_id=agent_id, call_id=call_id, call=call, action=action)


def _encoded(span: Span, told: PlaySpan | None) -> str:
    """Return what the span tells as JSON, only its time if it is the root of a trace.

    Raises:
        ImportFileError: it is nested too deep. The trajectory could not be finished.
    """
    try:
        text = (told or PlaySpan(at=span.start)).model_dump_json()
    except PydanticSerializationError:
        text = ""
    if not text or is_deep(text):
        raise ImportFileError(f"{span.place}: its attributes are nested too deep: send less")
    return storable_json(text)


def _agent(caller: Principal, named: str | None) -> str | None:
    """Return the agent of a span. A key of one agent is for that agent, whatever the span names."""
    own = caller.agents or ()
    return caller.attributed_agent(None if len(own) == 1 and not own[0].endswith("*") else named)


def _conversation(span: Span) -> str | None:
    return next(filter(None, map(span.text, _CONVERSATION)), None)


def _problem(place: str, error: Exception) -> str:
    if isinstance(error, ImportFileError):  # it names the place
        return str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False)[0]
        return f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{place}: {error}"

"""Events of play, applied to the database one after the other.

Each event is one transaction and may be repeated. All state is in Postgres, so any gateway takes
any event.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import asyncpg
from pydantic import ValidationError

from babylon.core.errors import (
    DatabaseError,
    RecorderError,
    ServingError,
    WindowError,
    reason_of,
)
from babylon.core.text import storable, storable_json
from babylon.core.windows import FIRST_YEAR, LAST_YEAR, window_at
from babylon.recorder import MarketOutcomesTracker
from babylon.recorder.trajectory import OpenTrajectory, Row, encode_step, insert_trajectory
from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.play.assemble import (
    TimedStep,
    action_of,
    add_steps,
    call_ids,
    finished_row,
    llm_call_elsewhere,
    open_play,
)
from babylon.serving.gateway.play.events import (
    ElsewhereCall,
    Event,
    EventResult,
    FeedbackEvent,
    FinishEvent,
    OutcomesEvent,
    PlayState,
    PriceEvent,
    ProbabilityEvent,
    ResolutionEvent,
    StartEvent,
    StepEvent,
    Truth,
)
from babylon.serving.gateway.play.owners import session_owner, wrong_key
from babylon.serving.gateway.play.ruled import Cover
from babylon.serving.gateway.play.size_limits import (
    require_few_calls,
    require_little_feedback,
    require_room,
)
from babylon.serving.gateway.play.span_steps import PlaySpan, first_agent, span_steps
from babylon.serving.gateway.recording_rules import UNRECORDED, RecordingRules
from babylon.serving.openai_wire import RequestError
from babylon.store import Store, require_recordable
from babylon.store.calls import lost_calls, wait_until_recorded
from babylon.store.connection import UNREACHABLE, Connection
from babylon.store.feedback import Feedback, give_feedback
from babylon.store.play_spans import (
    StoredSpan,
    add_spans,
    close_spans,
    known_spans,
    read_spans,
)
from babylon.store.plays import (
    PlayedCall,
    StoredPlay,
    add_step,
    adopt_calls,
    call_place,
    calling_agent,
    claim_plays,
    close_play,
    find_play,
    lock_play,
    played_calls,
    read_steps,
    recorded_ids,
    start_play,
)

log = logging.getLogger(__name__)
RECORDED_S = 5.0  # the longest wait for a call that was answered just now
LEFT_TO_OTHERS = 4  # connections, of which recording, routes and the owners of calls have need


class PlayHandler:
    """Applies events. ``minutes`` is the length of windows; ``rules`` hold for what is stored."""

    def __init__(self, store: Store, minutes: int, rules: RecordingRules) -> None:
        self._store, self._minutes, self._rules = store, minutes, rules
        # Events, spans and finishes together: each may hold its connection for seconds.
        held = max(1, store.pool.get_max_size() - LEFT_TO_OTHERS)
        self._connections = asyncio.Semaphore(held)

    async def apply(self, caller: Principal, event: Event) -> EventResult:
        """Apply one event; a refusal is a result too."""
        try:
            match event:
                case StartEvent():
                    return await self._start(caller, event)
                case StepEvent():
                    return await self._step(caller, event)
                case FinishEvent():
                    return await self._finish(caller, event)
                case FeedbackEvent():
                    return await self._feedback(caller, event)
                case _:
                    return await self._truth(caller, event)
        except RequestError as error:
            return refused(error)
        except RecorderError as error:
            return refused(RequestError(400, str(error), code="not_storable"))
        except WindowError as error:
            return refused(RequestError(409, str(error), code="window"))
        except asyncpg.DataError as error:  # its message may quote the event
            kind = type(error).__name__
            problem = (
                f"the database cannot hold a value of this {event.type} ({kind}): send another"
            )
            return refused(RequestError(400, problem, code="not_storable"))
        except (ServingError, *UNREACHABLE) as error:
            log.warning("an event of play is refused: %s", reason_of(error))
            return refused(RequestError(503, f"{reason_of(error)}: try again", code="unavailable"))

    async def add_spans(
        self, caller: Principal, trajectory_id: str, spans: Sequence[StoredSpan]
    ) -> int:
        """Store the spans of a trajectory, which becomes the caller's if it has no owner.

        Returns:
            The number of spans that came after the trajectory was finished, and are not stored.

        Raises:
            RequestError: 403, another key's; 409, the database takes no play; 413, the
                trajectory would be too large, and none of these spans is stored.
        """
        self._require_recordable()
        async with self._owned(caller, trajectory_id, begin=True) as (connection, play):
            if play.finished_at:
                return len(spans) - await known_spans(connection, spans)
            ruled = await asyncio.to_thread(self._ruled_spans, play, spans)
            await add_spans(connection, trajectory_id, ruled)
            await require_room(connection, trajectory_id)
        return 0

    async def state(self, caller: Principal, trajectory_id: str) -> PlayState:
        """Return the trajectory.

        Raises:
            RequestError: 404, unknown; 403, another key's.
        """
        play = await find_play(self._store.pool, trajectory_id)
        if play is None:
            raise _unknown(trajectory_id)
        if play.key_id != caller.key_id:
            raise wrong_key(trajectory_id)
        return PlayState(**{name: getattr(play, name) for name in PlayState.model_fields})

    async def _start(self, caller: Principal, event: StartEvent) -> EventResult:
        at = _moment(event.at)
        self._require_recordable()
        async with self._owned(caller, event.trajectory_id, begin=True) as (connection, play):
            agent_id = _agent(caller, event.agent_id or play.agent_id)
            if play.started_at:
                same = event.scenario_id in (None, play.scenario_id) and agent_id == play.agent_id
                if not same:
                    raise _conflict(play, "was started by another agent or in another scenario")
                return _stored(play, repeated=True)
            window = window_at(at, self._minutes)
            scenario_id = event.scenario_id or window.id
            play = await start_play(connection, play, agent_id, scenario_id, window, at)
        return _stored(play)

    async def _step(self, caller: Principal, event: StepEvent) -> EventResult:
        at = _moment(event.at)
        await asyncio.to_thread(_check_storable, event, at)
        async with self._owned(caller, event.trajectory_id) as (connection, play):
            encoded = await asyncio.to_thread(_encoded, event, self._cover(play))
            if play.finished_at:
                if event.number >= play.next_step:
                    raise _conflict(play, f"is finished and has no step {event.number}")
                return _stored(play, repeated=True)
            if play.started_at is None:
                raise _conflict(play, "is not started: send its start first, or")
            known = await add_step(connection, play.trajectory_id, event.number, at, encoded)
            if known is None:  # one that is sent again may arrive after the window's end
                open_play(play).check_time(at)
                await require_room(connection, play.trajectory_id)
            if known not in (None, encoded):
                raise _conflict(play, f"has another step {event.number}: number steps apart, or")
            if event.reward is not None and known is None:  # else feedback may have corrected it
                await _reward(connection, play, event.reward, event.number)
        return _stored(play, repeated=known is not None)

    async def _finish(self, caller: Principal, event: FinishEvent) -> EventResult:
        # The row is written in the transaction that closes the trajectory: a repeated finish finds
        # it closed, and a step that arrives meanwhile waits for the lock. What takes long runs in
        # threads: calls are answered meanwhile.
        self._require_recordable()
        await self._wait_for_calls(event.trajectory_id)
        async with self._owned(caller, event.trajectory_id) as (connection, play):
            if play.finished_at:
                return _stored(play, repeated=True)
            steps = await _steps(connection, play)
            spans = [] if steps else await _spans(connection, play)
            records = await _records(connection, play, steps, spans)
            if spans:
                steps = await asyncio.to_thread(span_steps, play.trajectory_id, spans, records)
            if not steps and not records:
                raise _conflict(play, "has neither steps nor recorded calls: send them first, or")
            if play.started_at is None:
                first = min([at for at, _ in steps] or [records[0].started_at])
                called = next((one.agent_id for one in records if one.agent_id), None)
                agent_id = _agent(caller, play.agent_id or called or first_agent(spans))
                window = window_at(first, self._minutes)
                play = await start_play(connection, play, agent_id, window.id, window, first)
            unknown = {*_named_calls(steps)} - {one.call_id for one in records}
            cover = self._cover(play)  # the agent may have been unknown before
            lost = await _lost(connection, unknown, cover)
            played, row, counts = await asyncio.to_thread(
                _built, play, event, cover, steps, records, lost
            )
            try:
                await insert_trajectory(self._store, connection, row, played.calls)
            except DatabaseError as error:  # an unknown agent, or an id that the game uses
                raise RequestError(409, str(error), code="conflict") from error
            await close_play(connection, play.trajectory_id, len(played.steps))
            await close_spans(connection, play.trajectory_id)
            if not await adopt_calls(connection, play.trajectory_id, records):
                raise _conflict(play, "names a call that another trajectory has taken")
            if event.reward is not None:
                await _reward(connection, play, event.reward)
        return _stored(play, **counts)

    async def _feedback(self, caller: Principal, event: FeedbackEvent) -> EventResult:
        trajectory_id = event.trajectory_id
        if trajectory_id is None:
            trajectory_id = await self._trajectory_of(caller, event.call_id or "")
        await self._wait_for_agent(trajectory_id)
        async with self._owned(caller, trajectory_id) as (connection, play):
            if cover := await self._cover_by_calls(connection, play):
                event = cover.over(event)
            given = Feedback(
                trajectory_id=trajectory_id,
                **event.model_dump(exclude={"type", "trajectory_id", "label", "comment"}),
                label=None if event.label is None else storable(event.label),
                comment=None if event.comment is None else storable(event.comment),
            )
            late = await give_feedback(connection, given)
            await require_little_feedback(connection, trajectory_id)
        return _stored(play, late=late)

    async def _truth(self, caller: Principal, event: Truth) -> EventResult:
        caller.require_all_agents("outcomes concern")
        self._require_recordable()
        tracker = MarketOutcomesTracker(self._store, minutes=self._minutes)
        match event:
            case OutcomesEvent():
                await tracker.write(event.window_id)
                return EventResult(window_id=event.window_id)
            case PriceEvent():
                tracker.price(event.ticker, event.price_usd, at=_moment(event.at))
            case ProbabilityEvent():
                at = _moment(event.at)
                tracker.probability(event.market_id, event.question, event.yes, at=at)
            case ResolutionEvent():
                at = _moment(event.at)
                tracker.resolve(event.market_id, event.outcome, at=at, question=event.question)
        await tracker.save()
        return EventResult()

    @asynccontextmanager
    async def _owned(
        self, caller: Principal, trajectory_id: str, *, begin: bool = False
    ) -> AsyncIterator[tuple[Connection, StoredPlay]]:
        """Open a transaction that holds the caller's trajectory; ``begin`` makes an unknown one.

        A recognised session is the caller's by its id, and is not stored before this.
        """
        owner = session_owner(trajectory_id)
        if owner not in (None, caller.key_id):
            raise wrong_key(trajectory_id)
        pool = self._store.pool
        async with self._connections, pool.acquire() as connection, connection.transaction():
            if begin or owner is not None:
                await claim_plays(connection, {trajectory_id: (caller.key_id, None)})
            play = await lock_play(connection, trajectory_id)
            if play is None:
                raise _unknown(trajectory_id)
            if play.key_id != caller.key_id:
                raise wrong_key(trajectory_id)
            yield connection, play

    def _cover(self, play: StoredPlay, agent_id: str | None = None) -> Cover | None:
        """Return what rules keep out of a trajectory."""
        agent_id = play.agent_id or agent_id
        return Cover.of(self._rules, play.key_id, agent_id, play.trajectory_id)

    async def _cover_by_calls(self, connection: Connection, play: StoredPlay) -> Cover | None:
        """Return what rules keep out of a trajectory of which only its calls may name the agent.

        Without a recorded call that is everything: a rule may have left the calls out.
        """
        if play.agent_id or not self._rules.about_agents:
            return self._cover(play)
        agent_id = await calling_agent(connection, play)
        if agent_id is None:
            return Cover(everything=True, fields=frozenset())
        return self._cover(play, agent_id)

    async def _wait_for_agent(self, trajectory_id: str) -> None:
        """Wait for the calls of a trajectory if rules need its agent, and only they name it."""
        if not self._rules.about_agents:
            return
        play = await find_play(self._store.pool, trajectory_id)
        if play.agent_id is None if play else session_owner(trajectory_id):
            await wait_until_recorded(self._store, timeout_s=RECORDED_S)

    def _ruled_spans(self, play: StoredPlay, spans: Sequence[StoredSpan]) -> Sequence[StoredSpan]:
        if not self._rules.in_force:
            return spans
        told = [PlaySpan.model_validate_json(one.span) for one in spans]
        cover = self._cover(play, first_agent(told))
        if cover is None:
            return spans
        texts = (storable_json(cover.over(one).model_dump_json()) for one in told)
        return [replace(one, span=text) for one, text in zip(spans, texts, strict=True)]

    async def _wait_for_calls(self, trajectory_id: str) -> None:
        """Wait until the calls that the steps name are in the database, or all that were made."""
        async with self._store.pool.acquire() as connection:
            play = await find_play(connection, trajectory_id)
            if play and play.finished_at:
                return
            stored = await read_steps(connection, trajectory_id) if play else []
            of_steps = await asyncio.to_thread(call_ids, stored)
            if play and of_steps and all(of_steps):
                named = {one for ids in of_steps for one in ids if not one.startswith(UNRECORDED)}
                if named <= await recorded_ids(connection, play, named):
                    return
        await wait_until_recorded(self._store, timeout_s=RECORDED_S)

    async def _trajectory_of(self, caller: Principal, call_id: str) -> str:
        place = await call_place(self._store, call_id, caller.key_id)
        if place is None and not call_id.startswith(UNRECORDED):
            await wait_until_recorded(self._store, timeout_s=RECORDED_S)
            place = await call_place(self._store, call_id, caller.key_id)
        if not place:
            known = "names no trajectory" if place == "" else "is no recorded one of this key"
            raise RequestError(
                404, f"call {call_id!r:.80} {known}: send trajectory_id", code="unknown_call"
            )
        return place

    def _require_recordable(self) -> None:
        try:
            require_recordable(self._store)
        except DatabaseError as error:
            raise RequestError(409, str(error), code="not_recordable") from error


def refused(error: RequestError) -> EventResult:
    """Return the result of an event that is refused."""
    return EventResult(status=error.status, code=error.code, error=str(error))


def _stored(play: StoredPlay, **more: Any) -> EventResult:
    return EventResult(trajectory_id=play.trajectory_id, window_id=play.window_id, **more)


def _agent(caller: Principal, agent_id: str | None) -> str:
    return caller.attributed_agent(agent_id) or f"key-{caller.key_id}"


def _moment(at: datetime | None) -> datetime:
    if at is not None and not FIRST_YEAR <= at.year <= LAST_YEAR:
        raise WindowError(f"at is {at}: send a time from {FIRST_YEAR} to {LAST_YEAR}")
    return at or datetime.now(UTC)


def _conflict(play: StoredPlay, problem: str) -> RequestError:
    remedy = problem if problem.endswith("or") else f"{problem}:"
    message = f"trajectory {play.trajectory_id!r:.80} {remedy} start another"
    return RequestError(409, message, code="conflict")


def _unknown(trajectory_id: str) -> RequestError:
    return RequestError(
        404,
        f"trajectory {trajectory_id!r:.80} is unknown: start it, or name it in a call's"
        " x-babylon-trajectory",
        code="unknown_trajectory",
    )


def _named_calls(steps: Sequence[TimedStep]) -> list[str]:
    return [call for _, step in steps for call in step.calls if isinstance(call, str)]


def _check_storable(event: StepEvent, at: datetime) -> None:
    """Refuse now what a finish could not store.

    Raises:
        RecorderError: a value cannot be stored.
    """
    elsewhere = [llm_call_elsewhere(one) for one in event.calls if isinstance(one, ElsewhereCall)]
    encode_step(event.number, at, event.state, (), elsewhere, action_of(event.action), 0.0)


def _encoded(event: StepEvent, cover: Cover | None) -> str:
    """Return a step as it is stored."""
    event = cover.over(event) if cover else event
    return storable_json(event.model_dump_json(exclude_unset=True))


def _built(
    play: StoredPlay,
    event: FinishEvent,
    cover: Cover | None,
    steps: Sequence[TimedStep],
    records: Sequence[PlayedCall],
    lost: Collection[str],
) -> tuple[OpenTrajectory, Row, dict[str, int]]:
    """Return the trajectory with its steps, its row, and the counts of its calls.

    Raises:
        What ``add_steps`` and ``finished_row`` raise.
    """
    if cover:
        steps, event = [(at, cover.over(step)) for at, step in steps], cover.over(event)
    played = open_play(play)
    calls, unrecorded = add_steps(played, steps, records, lost)
    return played, finished_row(played, event), {"calls": calls, "unrecorded": unrecorded}


async def _lost(
    connection: Connection, unknown: Collection[str], cover: Cover | None
) -> Collection[str]:
    """Return the calls without a record whose ids do not say so: the disk failed, or a rule came,
    while they were answered."""
    if cover and cover.everything:
        return unknown
    return await lost_calls(connection, [*unknown]) if unknown else ()


async def _steps(connection: Connection, play: StoredPlay) -> list[TimedStep]:
    stored = await read_steps(connection, play.trajectory_id)
    return await asyncio.to_thread(
        lambda: [(at, StepEvent.model_validate_json(step)) for at, step in stored]
    )


async def _spans(connection: Connection, play: StoredPlay) -> list[PlaySpan]:
    stored = await read_spans(connection, play.trajectory_id)
    try:
        return await asyncio.to_thread(
            lambda: [PlaySpan.model_validate_json(span) for span in stored]
        )
    except ValidationError as error:  # of a newer gateway; it costs its trajectory, not this one
        raise _conflict(play, "has spans that this gateway cannot read") from error


async def _records(
    connection: Connection,
    play: StoredPlay,
    steps: Sequence[TimedStep],
    spans: Sequence[PlaySpan],
) -> list[PlayedCall]:
    """Return the trajectory's calls and those that its steps or spans name, in the order of time.

    Raises:
        RequestError: 413, too much to hold; 409, a step or span names a call of another trajectory,
            or a step one of another agent. A call of a recognised session may become this
            trajectory's until the session is finished, which may train it.
    """
    of_spans = [one.call_id for one in spans if one.call_id]
    named = _named_calls(steps)
    await require_few_calls(connection, play, named + of_spans)
    records = await played_calls(connection, play, named + of_spans)
    others = {one.trajectory_id for one in records} - {None, play.trajectory_id}
    for place in filter(None, others):
        session = await find_play(connection, place) if session_owner(place) else None
        if not session_owner(place) or (session and session.finished_at):
            raise _conflict(play, f"names a call of trajectory {place!r:.80}")
    # Collection leaves out other agents' calls. OpenAI's ``user`` names an agent too.
    agent = play.agent_id or next((one.agent_id for one in records if one.agent_id), None)
    strange = {one.call_id: one.agent_id for one in records if one.agent_id not in (None, agent)}
    if other := next((strange[one] for one in named if one in strange), None):
        problem = f"is of agent {agent!r:.80} and names a call of agent {other!r:.80}"
        remedy = f"send {agent!r:.80} in x-babylon-agent of all its calls, or"
        raise _conflict(play, f"{problem}: {remedy}")
    return [one for one in records if one.call_id not in strange]


async def _reward(
    connection: Connection, play: StoredPlay, value: float, step: int | None = None
) -> None:
    given = Feedback(trajectory_id=play.trajectory_id, value=value, step=step)
    await give_feedback(connection, given)

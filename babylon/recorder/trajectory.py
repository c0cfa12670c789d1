"""The recorder of trajectories. It writes the game's own rows when a trajectory ends.

A trajectory belongs to the window in which it started, and all its steps lie in that window. An
agent that plays across the boundary finishes one trajectory and starts the next.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import UnionType
from uuid import uuid4

import asyncpg
import msgspec

from babylon.core.errors import DatabaseError, RecorderError, WindowError
from babylon.core.failpoints import failpoint
from babylon.core.llm_calls import PURPOSES, LlmCall
from babylon.core.text import storable, storable_json
from babylon.core.windows import Window, window_at
from babylon.store import Store, require_recordable
from babylon.store.connection import Connection

MAX_SCENARIO_ID = 100  # characters in the game's column
_MAX_INTEGER = 2**31 - 1  # in the game's columns
_PNL = "agentPnL"
_COUNTS = ("latency_ms", "max_tokens", "prompt_tokens", "completion_tokens")  # of a call
_TYPES: dict[str, type | UnionType] = {  # of a call's columns
    "model": str,
    "system_prompt": str,
    "user_prompt": str,
    "action_type": str | None,
    "reasoning": str | None,
    "temperature": int | float,
    "top_p": int | float | None,
    **dict.fromkeys(_COUNTS, int | float | None),
    "max_tokens": int | float,
}
# Fields of a call that its log row stores and ``stepsJson`` does not.
_LOG_ONLY = frozenset({"messages", "topP", "promptTokens", "completionTokens"})


class ProviderAccess(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Data that the agent read from a provider."""

    provider_name: str
    data: Mapping[str, object]
    purpose: str


class Action(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An action and its result.

    ``correctness`` has the game's own keys, for example ``{"predictionCorrect": True}``.
    """

    action_type: str
    success: bool
    parameters: Mapping[str, object]
    result: object = None
    error: str | None = None
    reasoning: str | None = None
    correctness: Mapping[str, object] | None = None

    @property
    def is_trade(self) -> bool:
        return self.action_type.startswith(("BUY", "SELL", "OPEN", "CLOSE"))


def encode_step(
    number: int,
    at: datetime,
    environment_state: Mapping[str, object],
    provider_accesses: Sequence[ProviderAccess],
    llm_calls: Sequence[LlmCall],
    action: Action,
    reward: float,
) -> str:
    """Return one element of ``stepsJson``. A state without ``agentPnL`` gets 0: it is required.

    Raises:
        RecorderError: ``agentPnL`` is no number, a call has no response or an unknown purpose, a
            field has another type than its column, or JSON or Postgres cannot hold a value.
    """
    pnl = environment_state.get(_PNL, 0.0)
    if isinstance(pnl, bool) or not isinstance(pnl, int | float):
        raise RecorderError(f"step {number}: {_PNL} is {pnl!r:.80}: send a number of US dollars")
    for call in llm_calls:
        _check_call(number, call)
    if not isinstance(action.action_type, str) or not isinstance(action.success, bool):
        raise RecorderError(
            f"step {number}: the action's type is {action.action_type!r:.80} and its success"
            f" {action.success!r:.80}: send a text, and True or False"
        )
    try:
        step = {
            "stepNumber": number,
            "timestamp": milliseconds(at),
            "environmentState": {_PNL: pnl, **environment_state},
            "providerAccesses": msgspec.to_builtins(list(provider_accesses)),
            "llmCalls": [_step_fields(call) for call in llm_calls],
            "action": msgspec.to_builtins(action),
            "reward": reward,
        }
    except (TypeError, RecursionError) as error:
        raise RecorderError(f"step {number} cannot be stored as JSON: {error}") from error
    return to_json(step, f"step {number}")


def _check_call(number: int, call: LlmCall) -> None:
    """Check what a column of the call's log would refuse: the finish would fail, each time."""
    if not isinstance(call.response, str) or call.purpose not in PURPOSES:
        raise RecorderError(
            f"step {number}: a call has response {call.response!r:.80} and purpose"
            f" {call.purpose!r}: give a text, and one of {', '.join(sorted(PURPOSES))}"
        )
    for name, kind in _TYPES.items():
        if not isinstance(value := getattr(call, name), kind):
            expected = getattr(kind, "__name__", str(kind))
            raise RecorderError(
                f"step {number}: a call's {name} is of type {type(value).__name__}: send {expected}"
            )
    for name in _COUNTS:
        if abs(getattr(call, name) or 0) > _MAX_INTEGER:
            raise RecorderError(
                f"step {number}: a call's {name} is {getattr(call, name)}: send at most"
                f" {_MAX_INTEGER}"
            )


def _step_fields(call: LlmCall) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(call)
    return {n: value for n, value in fields.items() if value is not None and n not in _LOG_ONLY}


def to_json(value: object, what: str) -> str:
    """Return compact JSON as JavaScript writes it, with NUL characters replaced.

    Raises:
        RecorderError: the value holds NaN, infinity, half a surrogate pair, or a foreign type, or
            is nested too deep.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise RecorderError(f"{what} cannot be stored as JSON: {error}") from error
    return storable_json(text)


def check_utf8(name: str, what: str) -> None:
    """Check a name now, because a write that fails on it could never be repeated with success.

    Raises:
        RecorderError: the name holds half a surrogate pair.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RecorderError(f"{what} {name!r:.80} is not UTF-8: send whole characters") from error


def milliseconds(at: datetime) -> int:
    """Return milliseconds since 1970, UTC."""
    return round(at.timestamp() * 1000)


def game_time(at: datetime) -> datetime:
    """Return the time as the game's columns hold it: UTC without a zone."""
    return at.astimezone(UTC).replace(tzinfo=None)


Row = dict[str, object]
"""Column name → value."""


@dataclass(slots=True)
class OpenTrajectory:
    """A trajectory that is being recorded.

    Steps are encoded when they are added, so later changes to the caller's dictionaries do not
    alter them.
    """

    trajectory_id: str
    agent_id: str
    scenario_id: str
    window: Window
    start: datetime
    last: datetime
    steps: list[str] = field(default_factory=list)
    calls: list[Row] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    total_reward: float = 0.0
    has_pnl: bool | None = None

    def check_time(self, moment: datetime) -> None:
        """Check the time of the next step.

        Raises:
            WindowError: it is outside the window, or before the last step.
        """
        if not self.last <= moment < self.window.end:
            raise WindowError(
                f"trajectory {self.trajectory_id}: a step at {moment.isoformat()} is not between"
                f" its last step {self.last.isoformat()} and the end of window {self.window.id}:"
                " finish the trajectory and start another"
            )

    def add_step(
        self,
        at: datetime,
        environment_state: Mapping[str, object],
        llm_calls: Sequence[LlmCall],
        action: Action,
        reward: float,
        provider_accesses: Sequence[ProviderAccess] = (),
    ) -> int:
        """Add a step and return its number.

        Raises:
            RecorderError: a value cannot be stored. The step is not added.
        """
        number, has_pnl = len(self.steps), _PNL in environment_state
        if self.has_pnl not in (None, has_pnl):
            raise RecorderError(
                f"step {number}: its state has {'an' if has_pnl else 'no'} {_PNL}, unlike the first"
                " step's: send the lifetime P&L in every step or in none"
            )
        number_given = isinstance(reward, int | float) and abs(reward) <= sys.float_info.max
        total = self.total_reward + reward if number_given else math.nan
        if not math.isfinite(total):  # no finish could store it
            raise RecorderError(
                f"step {number}: reward {reward!r:.80} is no finite number, or not in sum with"
                f" {self.total_reward!r}: send a finite number"
            )
        step = encode_step(
            number, at, environment_state, provider_accesses, llm_calls, action, reward
        )
        self.has_pnl = has_pnl
        calls = [call_row(self, number, i, call, at) for i, call in enumerate(llm_calls)]
        self.steps.append(step)
        self.calls.extend(calls)
        self.last = max(self.last, at)
        self.total_reward = total
        self.counts["errors"] += not action.success
        self.counts["trades"] += action.success and action.is_trade
        self.counts["posts"] += action.success and action.action_type == "CREATE_POST"
        return number


def trajectory_row(
    played: OpenTrajectory,
    *,
    end: datetime,
    now: datetime,
    final: dict[str, float | None],
    status: str,
    knowledge: Mapping[str, object],
) -> Row:
    """Return the row of ``trajectories``."""
    # Every column is named here, because the game's table has NOT NULL columns without defaults.
    what = f"trajectory {played.trajectory_id}"
    metrics = {
        "episodeLength": len(played.steps),
        "finalStatus": status,
        **{name: value for name, value in final.items() if value is not None},
        "tradesExecuted": played.counts["trades"],
        "postsCreated": played.counts["posts"],
        "errorCount": played.counts["errors"],
    }
    return {
        "id": played.trajectory_id,
        "trajectoryId": played.trajectory_id,
        "agentId": played.agent_id,
        "startTime": game_time(played.start),
        "endTime": game_time(end),
        # An agent may be finished weeks after its play.
        "durationMs": min(milliseconds(end) - milliseconds(played.start), _MAX_INTEGER),
        "windowId": played.window.id,
        "windowHours": -(-played.window.minutes // 60),  # rounded up
        "episodeId": f"{played.window.id}-{milliseconds(end)}",
        "scenarioId": played.scenario_id,
        "stepsJson": f"[{','.join(played.steps)}]",
        "rewardComponentsJson": to_json({"environmentReward": played.total_reward}, what),
        "metricsJson": to_json(metrics, what),
        "metadataJson": to_json({"isTrainingData": True, "gameKnowledge": dict(knowledge)}, what),
        "totalReward": played.total_reward,
        "episodeLength": len(played.steps),
        "finalStatus": status,
        **final,
        "tradesExecuted": played.counts["trades"],
        "postsCreated": played.counts["posts"],
        "createdAt": game_time(now),
        "updatedAt": game_time(now),
    }


def call_row(played: OpenTrajectory, step: int, i: int, call: LlmCall, at: datetime) -> Row:
    """Return the row of ``llm_call_logs`` for call ``i`` of a step."""
    call_id = f"{played.trajectory_id}-call-{step}-{i}"
    tokens = (call.prompt_tokens, call.completion_tokens)
    return {
        "id": call_id,
        "trajectoryId": played.trajectory_id,
        "stepId": f"{played.trajectory_id}-step-{step}",
        "callId": call_id,
        "timestamp": game_time(at),
        "latencyMs": call.latency_ms,
        "model": call.model,
        "purpose": call.purpose,
        "actionType": call.action_type,
        "systemPrompt": call.system_prompt,
        "userPrompt": call.user_prompt,
        "messagesJson": to_json(call.prompt, call_id),
        "response": call.response,
        "reasoning": call.reasoning,
        "temperature": call.temperature,
        "maxTokens": call.max_tokens,
        "topP": call.top_p,
        "promptTokens": call.prompt_tokens,
        "completionTokens": call.completion_tokens,
        "totalTokens": None if None in tokens else min(sum(n or 0 for n in tokens), _MAX_INTEGER),
        "metadata": to_json(
            {} if call.model_version is None else {"modelVersion": call.model_version}, call_id
        ),
    }


def insert_statement(table: str, rows: Sequence[Row]) -> tuple[str, list[tuple[object, ...]]]:
    """Return the arguments of ``executemany`` that insert rows with equal keys.

    NUL characters are replaced.
    """
    columns = ", ".join(f'"{name}"' for name in rows[0])
    places = ", ".join(f"${i + 1}" for i in range(len(rows[0])))
    values = [
        tuple(storable(value) if isinstance(value, str) else value for value in row.values())
        for row in rows
    ]
    return f'INSERT INTO "{table}" ({columns}) VALUES ({places})', values


def utc_now() -> datetime:
    return datetime.now(UTC)


class TrajectoryRecorder:
    """Recorder of any number of trajectories at once.

    ``minutes`` is the length of windows. ``clock`` gives the time of a call without ``at``; it may
    be simulated.
    """

    def __init__(
        self, store: Store, *, minutes: int = 60, clock: Callable[[], datetime] = utc_now
    ) -> None:
        require_recordable(store)
        self._store = store
        self._minutes = minutes
        self._clock = clock
        self._open: dict[str, OpenTrajectory] = {}

    def start(
        self,
        agent_id: str,
        scenario_id: str | None = None,
        *,
        at: datetime | None = None,
        trajectory_id: str | None = None,
    ) -> str:
        """Start a trajectory and return its id. The default scenario is the window.

        Raises:
            RecorderError: an id is not UTF-8, the scenario's is too long, or the trajectory is open
                already.
        """
        start = moment_in_utc(at, self._clock)
        window = window_at(start, self._minutes)
        name = trajectory_id or uuid4().hex
        scenario = scenario_id or window.id
        for given, what in ((name, "trajectory"), (agent_id, "agent"), (scenario, "scenario")):
            check_utf8(given, f"{what} id")
        if len(scenario) > MAX_SCENARIO_ID:
            raise RecorderError(
                f"scenario id {scenario!r} is longer than {MAX_SCENARIO_ID} characters: shorten it"
            )
        if name in self._open:
            raise RecorderError(f"trajectory {name!r} is open already: finish it first")
        self._open[name] = OpenTrajectory(name, agent_id, scenario, window, start, start)
        return name

    def window(self, trajectory_id: str) -> Window:
        """Return the window of an open trajectory."""
        return self._find(trajectory_id).window

    def next_step(self, trajectory_id: str) -> int:
        """Return the number of the next step, for the ``x-babylon-step`` header of its requests."""
        return len(self._find(trajectory_id).steps)

    def step(
        self,
        trajectory_id: str,
        *,
        environment_state: Mapping[str, object],
        llm_calls: Sequence[LlmCall],
        action: Action,
        reward: float,
        provider_accesses: Sequence[ProviderAccess] = (),
        at: datetime | None = None,
    ) -> int:
        """Add a step and return its number. Steps come in time order.

        ``environment_state`` is the game's own. Of its keys, ``agentPnL`` (USD, the agent's
        lifetime P&L) is read, which all steps have or none; the built-in trading reward also reads
        ``agentBalance`` (USD).

        Raises:
            WindowError: the time is outside the trajectory's window or before its last step.
            RecorderError: a value cannot be stored. The step is not added.
        """
        played = self._find(trajectory_id)
        moment = moment_in_utc(at, self._clock)
        played.check_time(moment)
        return played.add_step(
            moment, environment_state, llm_calls, action, reward, provider_accesses
        )

    async def finish(
        self,
        trajectory_id: str,
        *,
        final_balance: float | None = None,
        final_pnl: float | None = None,
        status: str = "completed",
        game_knowledge: Mapping[str, object] | None = None,
        at: datetime | None = None,
    ) -> None:
        """Write the trajectory and its calls in one transaction, and close it.

        ``final_balance`` and ``final_pnl`` are in USD; ``final_pnl`` is the agent's lifetime P&L.
        ``game_knowledge`` is ground truth that only the judge sees.

        Raises:
            DatabaseError: the trajectory is stored already, or the game does not know the agent.
        """
        played = self._find(trajectory_id)
        row = trajectory_row(
            played,
            end=max(moment_in_utc(at, self._clock), played.last),
            now=self._clock(),
            final={"finalBalance": final_balance, "finalPnL": final_pnl},
            status=status,
            knowledge=game_knowledge or {},
        )
        # A step that comes meanwhile must be refused, for the row would not hold it.
        del self._open[trajectory_id]
        stored = False
        try:
            failpoint("recorder.before")
            async with self._store.pool.acquire() as connection, connection.transaction():
                await insert_trajectory(self._store, connection, row, played.calls)
            failpoint("recorder.after")
            stored = True
        finally:
            if not stored:  # the caller can finish the trajectory again
                self._open[trajectory_id] = played

    def _find(self, trajectory_id: str) -> OpenTrajectory:
        played = self._open.get(trajectory_id)
        if played is None:
            raise RecorderError(f"trajectory {trajectory_id!r} is not open: call start first")
        return played


async def insert_trajectory(
    store: Store, connection: Connection, row: Row, calls: Sequence[Row]
) -> None:
    """Write a trajectory and its calls, in the caller's transaction.

    Raises:
        DatabaseError: the trajectory is stored already, or the game does not know the agent.
    """
    if store.game_tables_ours:
        await connection.execute(
            # Without a username: it is unique, and a user of another id may have this one.
            'INSERT INTO "User" (id, "displayName", "isAgent") VALUES ($1, $1, true)'
            " ON CONFLICT DO NOTHING",
            storable(str(row["agentId"])),
        )
    try:
        await connection.executemany(*insert_statement("trajectories", [row]))
        failpoint("recorder.inserted")
        if calls:
            await connection.executemany(*insert_statement("llm_call_logs", calls))
    except asyncpg.ForeignKeyViolationError as error:
        raise DatabaseError(
            f"agent {row['agentId']!r} is not a user of this game ({error.detail}):"
            " register it in the game first"
        ) from error
    except asyncpg.UniqueViolationError as error:
        raise DatabaseError(
            f"trajectory {row['trajectoryId']!r} is stored already: {error.detail}"
        ) from error


def moment_in_utc(at: datetime | None, clock: Callable[[], datetime]) -> datetime:
    """Return the given moment or the clock's, in UTC.

    Raises:
        RecorderError: the moment has no time zone.
    """
    moment = at or clock()
    if moment.tzinfo is None:
        raise RecorderError(f"time {moment.isoformat()} has no time zone: pass tzinfo=UTC")
    return moment.astimezone(UTC)

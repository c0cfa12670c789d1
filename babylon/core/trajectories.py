"""Trajectories and their calls, as every stage after validation reads them.

A ``Call`` is one LLM request. A call that the gateway recorded has the token ids and the behaviour
logprobs. A call known only from the game's log has text alone: the trainer tokenizes it again, and
``retokenized`` is true.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import msgspec
import polars as pl

from babylon.core.artifacts import iter_artifact
from babylon.core.home import Home
from babylon.core.llm_calls import JsonObject, Message, answer_message
from babylon.core.types import Artifact


class Call(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One LLM request inside a step.

    ``logprobs`` ``[T]``: natural logarithms of the distribution that was sampled from (after
    temperature), one for each of the T completion tokens. ``untrainable``: why the reply must not
    be trained on, because it was not sampled from the policy alone. ``tools``: those that the
    request offered. ``response``, ``tool_calls`` and ``reasoning`` are the parts of the answer.
    ``unseen``: the token ids stand for text that no other field holds.
    """

    step: int
    messages: tuple[Message, ...]
    response: str
    temperature: float = 1.0
    top_p: float = 1.0
    policy_version: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    untrainable: str | None = None
    tools: tuple[JsonObject, ...] = ()
    tool_calls: tuple[JsonObject, ...] = ()
    reasoning: str | None = None
    unseen: bool = False

    @property
    def answer(self) -> Message:
        """The assistant's message, as later prompts hold it."""
        return answer_message(self.response, self.tool_calls, self.reasoning)

    @property
    def retokenized(self) -> bool:
        """True when the exact tokens are unknown, so that the trainer tokenizes the text."""
        return self.completion_token_ids is None


class Payoff(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The part of a trajectory's P&L that one step's decision made, known in hindsight.

    ``failed``: the reply was malformed, or the action was refused.
    """

    step: int
    pnl_usd: float
    failed: bool = False


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's play in one window, reduced to the facts that scoring and training need.

    ``pnl_usd``: profit inside this window, not the agent's lifetime P&L. ``drawdown_usd``: the
    largest fall of the P&L from a peak inside this window; 0 in artifacts of earlier versions,
    which lack it. ``wins``: the ``trades`` that closed or resolved in profit. ``actions``:
    successful steps other than HOLD. ``payoffs``: one for each step, their sum is ``pnl_usd``; none
    in artifacts of earlier versions.
    """

    trajectory_id: str
    agent_id: str
    window_id: str
    scenario_id: str
    start: datetime
    end: datetime
    pnl_usd: float
    wins: int
    trades: int
    actions: int
    steps: int
    calls: tuple[Call, ...]
    drawdown_usd: float = 0.0
    payoffs: tuple[Payoff, ...] = ()

    @property
    def win_rate(self) -> float:
        """``wins`` / ``trades``, 0 without trades."""
        return self.wins / self.trades if self.trades else 0.0


class TrainingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a trajectory that the trainer may see: no ground truth.

    ``rewards``: step → the part of the score that its decision earned, if the scorer knows it.
    """

    trajectory_id: str
    agent_id: str
    scenario_id: str
    score: float
    calls: tuple[Call, ...]
    rewards: dict[int, float] = {}


# Only the judge reads ``game_json`` (the steps as the game wrote them), ``knowledge_json`` (ground
# truth) and ``step_rewards_json`` (``quality.correctness.StepReward``, derived from ground truth).
# Of the steps ``stages.words`` reads the ids of calls.
TRAJECTORY_SCHEMA = pl.Schema(
    [
        ("trajectory_id", pl.String),
        ("agent_id", pl.String),
        ("window_id", pl.String),
        ("scenario_id", pl.String),
        ("start", pl.Datetime("us", "UTC")),
        ("end", pl.Datetime("us", "UTC")),
        ("pnl_usd", pl.Float64),
        ("drawdown_usd", pl.Float64),
        ("wins", pl.Int64),
        ("trades", pl.Int64),
        ("actions", pl.Int64),
        ("steps", pl.Int64),
        ("calls_json", pl.String),
        ("payoffs_json", pl.String),
        ("game_json", pl.String),
        ("knowledge_json", pl.String),
        ("step_rewards_json", pl.String),
    ]
)
PLAIN = tuple(name for name in TRAJECTORY_SCHEMA if not name.endswith("_json"))
_LEARNT_FROM = ("trajectory_id", "agent_id", "scenario_id", "score")


def trajectory_row(
    trajectory: Trajectory, *, game_json: str, knowledge_json: str, step_rewards_json: str = "[]"
) -> dict[str, object]:
    """Return a row of ``TRAJECTORY_SCHEMA``."""
    return {
        **{name: getattr(trajectory, name) for name in PLAIN},
        "calls_json": msgspec.json.encode(trajectory.calls).decode(),
        "payoffs_json": msgspec.json.encode(trajectory.payoffs).decode(),
        "game_json": game_json,
        "knowledge_json": knowledge_json,
        "step_rewards_json": step_rewards_json,
    }


def read_trajectories(home: Home, artifact: Artifact) -> list[Trajectory]:
    """Read the trajectories of a validated, thinned or scored artifact, without ground truth."""
    return list(iter_trajectories(home, artifact))


def iter_trajectories(home: Home, artifact: Artifact) -> Iterator[Trajectory]:
    """Yield the same, with a portion of them in memory."""
    for frame in iter_artifact(home, artifact, [*PLAIN, "calls_json", "payoffs_json"]):
        for row in _decoded(frame.iter_rows(named=True)):
            yield Trajectory(**row)


def training_rows(home: Home, artifact: Artifact) -> list[TrainingRow]:
    """Read the trainer's rows of a scored artifact. The ground truth columns are not read."""
    frames = iter_artifact(home, artifact, [*_LEARNT_FROM, "calls_json", "rewards_json"])
    return [TrainingRow(**row) for frame in frames for row in _decoded(frame.iter_rows(named=True))]


_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "calls": msgspec.json.Decoder(tuple[Call, ...]),
    "payoffs": msgspec.json.Decoder(tuple[Payoff, ...]),
    "rewards": msgspec.json.Decoder(dict[int, float]),
}


def _decoded(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows with the JSON columns that they have; artifacts of earlier versions lack some."""
    for row in rows:
        for name, decoder in _DECODERS.items():
            if (text := row.pop(f"{name}_json", None)) is not None:
                row[name] = decoder.decode(text)
        yield row

"""Records of ATIF, the Agent Trajectory Interchange Format (Harbor RFC 0001, version 1.7).

A document is one trajectory: a list of system, user and agent steps that form one conversation.
The prompt of a reply is everything before it. Babylon's agents start a new conversation with every
tick. Therefore our agent steps give the first step of their prompt in
``extra.babylon.prompt_from``, and earlier replies inside a prompt are marked ``is_copied_context``.

``metrics`` carries ``prompt_token_ids``, ``completion_token_ids`` and ``logprobs``. RFC 0001 has no
policy version; ours is in ``metrics.extra.babylon``. Ground truth is not written. The reader
ignores unknown keys. The writer omits default values.
"""

from datetime import datetime
from typing import Literal

import msgspec

from babylon.formats.documents import JsonObject
from babylon.formats.trace import Purpose

VERSION = "ATIF-v1.7"
READABLE = "ATIF-v1."
OURS = "babylon"  # the key in ``extra`` that holds our own fields


class TrajectoryExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``extra.babylon`` of a trajectory."""

    window_id: str | None = None
    scenario_id: str | None = None
    start: datetime | None = None
    end: datetime | None = None
    final_balance: float | None = None
    final_pnl: float | None = None
    status: str = "completed"


class StepExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``extra.babylon`` of a step. ``role`` is set if ``source`` does not give the role."""

    role: str | None = None
    step: int | None = None
    prompt_from: int = 1
    temperature: float = 1.0
    top_p: float | None = None
    max_tokens: int = 0
    purpose: Purpose = "action"
    action_type: str | None = None
    latency_ms: int | None = None
    action: JsonObject | None = None
    state: JsonObject = {}
    reward: float = 0.0


class MetricsExtra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``metrics.extra.babylon``: the policy that sampled the tokens."""

    policy_version: int | None = None
    route_version: int = 0
    finish_reason: str = "stop"
    seed: int | None = None


class AtifMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    extra: JsonObject | None = None


class AtifAgent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    version: str
    model_name: str | None = None


class AtifStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[JsonObject]
    timestamp: datetime | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[JsonObject] | None = None
    observation: JsonObject | None = None
    metrics: AtifMetrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None
    extra: JsonObject | None = None


class Atif(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    schema_version: str
    agent: AtifAgent
    steps: tuple[AtifStep, ...]
    session_id: str | None = None
    trajectory_id: str | None = None
    final_metrics: JsonObject | None = None
    extra: JsonObject | None = None
    subagent_trajectories: list[JsonObject] | None = None

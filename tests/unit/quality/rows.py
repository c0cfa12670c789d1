"""Builders of game rows for the tests of data quality."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from babylon.core.game_rows import GameRow
from babylon.core.settings import Settings
from babylon.core.windows import parse_window_id
from tests import conftest

WINDOW = parse_window_id("2025-11-14T09:00")
SETTINGS = Settings(quality={"min_actions": 5})


def step(number: int, **changes: Any) -> dict[str, Any]:
    """One sound step; keyword arguments replace its keys."""
    return {
        "stepNumber": number,
        "timestamp": 1763110920020 + number,
        "environmentState": {"agentBalance": 1000, "agentPnL": 10 * number, "openPositions": 0},
        "providerAccesses": [],
        "llmCalls": [call()],
        "action": {"actionType": "HOLD", "parameters": {}, "success": True},
        "reward": 0,
        **changes,
    }


def call(**changes: Any) -> dict[str, Any]:
    return {
        "model": "babylon",
        "systemPrompt": "You trade.",
        "userPrompt": "Trade?",
        "response": "HOLD",
        "temperature": 0.7,
        "maxTokens": 150,
        "purpose": "action",
        **changes,
    }


def steps(count: int = 5) -> list[dict[str, Any]]:
    return [step(number) for number in range(count)]


def row(game_steps: Any = None, **changes: Any) -> GameRow:
    """A sound row with these steps (a list, or text as it is); keywords replace columns."""
    played = steps() if game_steps is None else game_steps
    sound = GameRow(
        trajectory_id="t1",
        agent_id="agent-1",
        window_id=WINDOW.id,
        scenario_id=None,
        start=datetime(2025, 11, 14, 9, 2, tzinfo=UTC),
        end=datetime(2025, 11, 14, 9, 3, tzinfo=UTC),
        total_reward=0.6,
        final_pnl_usd=None,
        steps_json=played if isinstance(played, str) else compact(played),
        metrics_json="{}",
        metadata_json="{}",
        reward_components_json="{}",
    )
    return replace(sound, **changes)


def compact(value: Any) -> str:
    """JSON as JavaScript writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def real_rows() -> list[GameRow]:
    """The fifteen real rows of window 2025-11-14T09:00."""
    return [_real_row(values) for values in conftest.real_rows("trajectories")]


def _real_row(values: dict[str, Any]) -> GameRow:
    return GameRow(
        trajectory_id=values["trajectoryId"],
        agent_id=values["agentId"],
        window_id=values["windowId"],
        scenario_id=values["scenarioId"],
        start=datetime.fromisoformat(values["startTime"]).replace(tzinfo=UTC),
        end=datetime.fromisoformat(values["endTime"]).replace(tzinfo=UTC),
        total_reward=values["totalReward"],
        final_pnl_usd=values["finalPnL"],
        steps_json=values["stepsJson"],
        metrics_json=values["metricsJson"],
        metadata_json=values["metadataJson"],
        reward_components_json=values["rewardComponentsJson"],
    )

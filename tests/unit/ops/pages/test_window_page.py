"""A window's page answers who won and who lost most, however many played."""

from datetime import UTC, date, datetime
from typing import Any

import pytest

from babylon.core.windows import WindowState
from babylon.ops.pages.window_facts import Played, WindowFacts
from babylon.ops.pages.window_page import MOST_AGENTS, window_markdown
from babylon.store.judgments import DaySpent
from babylon.store.policies import Policy
from babylon.store.scores import StoredScore
from babylon.store.windows import WindowRow


def page(agents: int, **facts: Any) -> str:
    row = WindowRow(
        window_id="2025-11-14T07:00",
        minutes=60,
        state=WindowState.REJECTED,
        epoch=1,
        owner=None,
        lease_until=None,
        leased=False,
        attempts=0,
        retry_at=None,
        batch_id=None,
        reason=None,
        metrics=facts.pop("metrics", {}),
        scored=None,
        updated_at=datetime(2025, 11, 14, tzinfo=UTC),
    )
    played = [
        Played(
            trajectory_id=f"t{number}",
            agent_id=f"agent-{number}",
            scenario_id="s",
            pnl_usd=0.5 - number,
            score=StoredScore(trajectory_id=f"t{number}", scorer="judge", score=0.5, reasons=[]),
        )
        for number in range(agents)
    ]
    return window_markdown(WindowFacts(row=row, played=played, **facts))


def test_the_agents_that_won_and_lost_most_are_shown_of_many() -> None:
    found = page(MOST_AGENTS + 30).partition("## Best and worst")[0]
    assert f"`agent-{MOST_AGENTS + 29}` | 1 | -{MOST_AGENTS + 28}.50" in found
    assert "`agent-0` | 1 | +0.50" in found and "| … 30 agents between |" in found
    assert found.count("`agent-") == MOST_AGENTS


def test_the_judges_cost_is_shown_by_day_and_beside_that_of_all_windows() -> None:
    day = date(2025, 11, 15)
    one = DaySpent(
        day=day, window_id="w", judge="|j", unanswered=0, tokens=900, usd=0.5, requests=3
    )
    found = page(1, judging=[one], days_usd={day: 2.25})
    assert "| 2025-11-15 | `¦j` | 3 | 900 | 0.5000 |" in found
    assert "All windows together cost $2.2500 on 2025-11-15." in found
    assert "What judging cost" not in page(1)


def test_few_agents_are_all_shown() -> None:
    found = page(MOST_AGENTS).partition("## Best and worst")[0]
    assert found.count("`agent-") == MOST_AGENTS and "between" not in found


@pytest.mark.parametrize("scenarios", [0, 8])
def test_a_gate_that_played_nothing_shows_no_figures_and_no_promotion(scenarios: int) -> None:
    policy = Policy(
        policy_version=1,
        parent_version=0,
        kind="lora",
        uri="/nowhere",
        base_model="tiny",
        window_id="2025-11-14T07:00",
        batch_id="b",
        metrics={},
        verdict={"promote": True, "reason": "a canary decides", "scenarios": scenarios},
        created_at=datetime(2025, 11, 14, tzinfo=UTC),
        removed_at=None,
    )
    gate = page(1, policy=policy).partition("## The gate")[2]
    assert "Passed: a canary decides" in gate and "Promoted" not in gate
    assert ("win rate" in gate) == bool(scenarios)


def test_a_champion_that_the_fleet_took_back_is_not_told_to_stay() -> None:
    """A window whose policy was rejected may bring an earlier policy back."""
    metrics: dict[str, Any] = {"policy_version": 3, "arm": None, "route_version": 9}
    live = page(1, metrics={**metrics, "deployment": "a loss; the fleet earned -400"})
    assert "Policy 3 does not serve. Route 9 is in force: a loss; the fleet earned" in live
    assert "stays" not in live
    metrics["arm"] = "challenger"
    assert "Policy 3 serves as challenger, on route 9: " in page(
        1, metrics={**metrics, "deployment": "so"}
    )

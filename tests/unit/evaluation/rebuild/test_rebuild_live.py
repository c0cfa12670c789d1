"""Windows of the live game: prices that agents noted, and nothing that nobody did."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from babylon.core.errors import ReplayError
from babylon.evaluation.rebuild.rebuild_live import rebuild_live
from babylon.evaluation.rebuild.recorded import RecordedRow, RecordedScenario
from babylon.evaluation.rebuild.recorded_windows import recorded_row
from tests.conftest import real_rows
from tests.unit.quality.rows import call

NINE = datetime(2025, 11, 14, 9, tzinfo=UTC)


def sees(minute: float, ticker: str | None = None, price: float = 0.0) -> dict[str, Any]:
    """A step in a minute of the window, with a look at a price."""
    access = {"providerName": "market_data", "data": {"ticker": ticker, "price": price}}
    return {
        "timestamp": (NINE.timestamp() + 60 * minute) * 1000,
        "environmentState": {"agentBalance": 500.0, "agentPnL": 0.0},
        "providerAccesses": [access] if ticker else [],
        "llmCalls": [call(response='{"action":"hold"}')],
    }


def ends(ticker: str, start: float, end: float) -> dict[str, Any]:
    return {"stockTicker": ticker, "startPrice": start, "endPrice": end}


def row(
    agent: str, *steps: dict[str, Any], outcomes: tuple[dict[str, Any], ...] = ()
) -> RecordedRow:
    made = recorded_row(
        outcomes,
        trajectory_id=f"t-{agent}",
        agent_id=agent,
        window_id="2025-11-14T09:00",
        scenario_id="2025-11-14T09:00",
        final_pnl_usd=None,
        steps_json=json.dumps(steps),
        metadata_json="{}",
    )
    assert isinstance(made, RecordedRow)
    return made


def paths(recorded: RecordedScenario) -> dict[str, tuple[float, ...]]:
    return {perp.ticker: perp.prices for perp in recorded.scenario.perps}


def test_what_all_agents_saw_makes_one_path_a_ticker() -> None:
    recorded = rebuild_live(
        [
            row("a", sees(2.0, "X", 10.0), sees(2.5, "X", 11.0), sees(5.0)),
            row("b", sees(2.2, "X", 99.0), sees(4.0, "X", 12.0)),
        ]
    )
    assert paths(recorded) == {"X": (11.0, 11.0, 12.0, 12.0, 12.0)}
    assert (recorded.prices, recorded.missing) == ("seen", ())
    assert (recorded.scenario.start_minute, recorded.scenario.rules.ticks) == (9 * 60 + 2, 4)
    assert recorded.scenario.rules.start_balance == 500.0


def test_outcomes_give_the_start_that_nobody_saw_and_the_end() -> None:
    recorded = rebuild_live(
        [row("a", sees(0), sees(1, "X", 12.0), outcomes=(ends("X", 10.0, 15.0),))]
    )
    assert paths(recorded) == {"X": (10.0, 12.0, 15.0)}
    assert recorded.missing == (
        "X: no price was seen before minute 1; until then it is the window's first price",
    )


def test_what_nobody_noted_is_missing_and_a_line_is_drawn_only_when_asked_for() -> None:
    rows = [
        row("a", sees(0, "X", 10.0), sees(1, "LATE", 3.0), outcomes=(
            ends("Y", 100.0, 110.0), {"predictionMarketId": "m1", "outcome": "YES"},
        ))
    ]  # fmt: skip
    recorded = rebuild_live(rows)
    assert [*paths(recorded)] == ["X"]
    assert recorded.missing == (
        "LATE: no price was seen before minute 1",
        "Y: only its first and last price are recorded",
        "question m1: only its last probability is recorded",
    )
    drawn = rebuild_live(rows, interpolate=True)
    assert paths(drawn)["Y"] == (100.0, 105.0, 110.0)
    assert drawn.prices == "interpolated" and len(drawn.missing) == 2


def test_without_any_price_a_window_is_refused() -> None:
    with pytest.raises(ReplayError, match=r"no price history .*Y: only its first and last price"):
        rebuild_live([row("a", sees(0), outcomes=(ends("Y", 1.0, 2.0),))])


def test_the_game_s_real_rows_say_how_their_perps_moved() -> None:
    outcomes = tuple(real_rows("market_outcomes"))
    rows = [
        row(raw["agentId"], *json.loads(raw["stepsJson"]), outcomes=outcomes)
        for raw in real_rows("trajectories")
        if "providerAccesses" in raw["stepsJson"] and len(json.loads(raw["stepsJson"])) > 5
        and all(step["llmCalls"] for step in json.loads(raw["stepsJson"]))
    ]  # fmt: skip
    recorded = rebuild_live(rows)
    assert paths(recorded) and recorded.prices == "seen"
    assert any("TeslAI: only its first and last price" in line for line in recorded.missing)
    assert any("question 278901234567890001" in line for line in recorded.missing)

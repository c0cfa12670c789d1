"""Pages about a gate that compared scores of a task of one's own (``EVALUATOR``)."""

from dataclasses import replace

from babylon.core.types import Claim, Verdict
from babylon.evaluation.arena.match_page import verdict_markdown
from babylon.ops.pages.fleet_page import _gate
from babylon.ops.pages.stage_lines import stage_lines
from babylon.ops.pages.window_facts import gate_measure
from babylon.ops.status_page.app import _number, _share

TASK = Verdict(
    claim=Claim(window_id="2025-11-14T09:00", epoch=1, owner="w"),
    policy_version=2,
    route_version=1,
    promote=True,
    reason="solved tickets: difference +0.0656 is a gain",
    scenarios=64,
    pnl_before=0.3125,
    pnl_after=0.378,
    malformed_before=0.0,
    malformed_after=0.0,
)


def test_a_tasks_score_is_not_told_as_dollars() -> None:
    assert "| mean score | 0.3125 | 0.378 |" in verdict_markdown(TASK)
    assert "mean score of 64 scenarios 0.3125 before, 0.378 after" in [*stage_lines(TASK)]
    assert gate_measure({"pnl_after": 0.378, "drawdown_after": None}) == "mean score"
    assert gate_measure({"pnl_after": 3.0, "drawdown_after": 2.0}) == "mean P&L, $"
    assert gate_measure({}) == "mean P&L, $"


def test_a_gate_that_promoted_is_not_told_to_have_refused() -> None:
    """That of a task, and a canary, have no frozen suite."""
    page, refused = verdict_markdown(TASK), verdict_markdown(replace(TASK, promote=False))
    assert "Recorded play: not checked, this gate has none." in page
    assert "Frozen suite: not played, this gate has none." in page
    assert "Frozen suite: not played, the match did not promote." in refused


def test_small_scores_and_measures_that_nobody_took_are_shown_as_they_are() -> None:
    assert [_number(one) for one in (0.3125, -0.004, 0.0, 12.34, None)] == [
        "0.312",
        "-0.004",
        "0.0",
        "12.3",
        "–",
    ]
    assert [_share(one) for one in (0.0, 0.021, None)] == ["0.0%", "2.1%", "–"]


def test_the_fleets_page_names_a_score() -> None:
    figures = {"pnl_before": 0.3125, "pnl_after": 0.378}
    assert _gate({**figures, "drawdown_after": None}, "pnl_after") == "score 0.378"
    assert _gate({**figures, "drawdown_after": 4.0}, "pnl_before") == "0.3"
    assert _gate({}, "pnl_after") is None

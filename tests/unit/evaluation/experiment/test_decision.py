from typing import Any

import pytest

from babylon.core.settings import ExperimentSettings
from babylon.evaluation.experiment.decision import Evidence, decide
from babylon.evaluation.experiment.guardrails import CUT, MEDIAN, guard, sample_ratio
from babylon.evaluation.experiment.review_records import Comparison, Guardrail, State
from tests.unit.evaluation.experiment.test_difference import arms

SETTINGS = ExperimentSettings(min_agents=40, min_hours=3, max_hours=100, tolerated_loss_usd=2)


def pnl(low: float, high: float) -> Comparison:
    return Comparison(
        champion=0,
        challenger=(low + high) / 2,
        champion_agents=20,
        challenger_agents=20,
        difference=(low + high) / 2,
        low=low,
        high=high,
    )


def rail(state: State) -> Guardrail:
    return Guardrail(name="replies cut", state=state, bound=0.05, change=0.1, low=0.06, high=0.2)


BETTER, WORSE, OPEN = pnl(1, 5), pnl(-9, -3), pnl(-3, 4)
FINE = sample_ratio([0.5] * 40, 20)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("promote", {}, "better than the champion"),
    ("insufficient", {"pnl": OPEN}, "not yet clear"),
    ("keep", {"pnl": OPEN, "hours": 100}, "undecided after AB_MAX_HOURS=100"),
    ("rollback", {"pnl": WORSE}, "worse than the champion"),
    ("rollback", {"pnl": WORSE, "hours": 0.1}, "worse than the champion"),
    ("insufficient", {"pnl": pnl(-9, -1)}, "not yet clear"),  # within what is tolerated
    ("insufficient", {"hours": 2.9}, "only 2.9 h old"),
    ("insufficient", {"pnl": None}, "too little finished play"),
    ("insufficient", {"ratios": [sample_ratio([0.5] * 39, 20)] * 2}, "AB_MIN_AGENTS=40"),
    ("insufficient", {"ratios": [sample_ratio([0.5] * 39, 20), FINE], "hours": 2}, "only 2.0 h"),
    ("insufficient", {"ratios": [sample_ratio([0.5] * 400, 130), FINE]}, "ratio broken: 130"),
    ("insufficient", {"ratios": [FINE, sample_ratio([0.5] * 400, 130)]}, "ratio broken: 130"),
    ("keep", {"ratios": [sample_ratio([0.5] * 400, 130)] * 2, "hours": 101}, "ratio broken"),
    ("rollback", {"guardrails": [rail("broken")]}, "replies cut 0.1 [0.06, 0.2], bound 0.05"),
    ("rollback", {"guardrails": [rail("broken")], "pnl": None}, "guardrail broken"),
    ("insufficient", {"guardrails": [rail("passes"), rail("doubtful")]}, "but replies cut"),
    ("promote", {"guardrails": [rail("passes"), rail("unknown")]}, "better"),
]


@pytest.mark.parametrize(("decision", "changes", "reason"), CASES)
def test_the_decision_follows_from_the_evidence(
    decision: str, changes: dict[str, Any], reason: str
) -> None:
    evidence: dict[str, Any] = {"pnl": BETTER, "ratios": [FINE, FINE], "guardrails": [], "hours": 5}
    decided, why = decide(Evidence(**(evidence | changes)), SETTINGS)
    assert decided == decision
    assert reason in why


def test_a_guardrail_is_broken_when_the_whole_interval_is_beyond_the_bound() -> None:
    champion = [0.0, 0.01] * 100
    states = [guard(CUT, arms(champion, [share] * 20)).state for share in (0.02, 0.07, 0.5)]
    assert states == ["passes", "doubtful", "broken"]
    assert guard(CUT, arms(champion, [0.5])).state == "unknown"


def test_latencies_are_compared_by_their_ratio() -> None:
    champion = [100.0, 110, 90, 105, 95] * 20
    found = guard(MEDIAN, arms(champion, [3 * value for value in champion]))
    assert found.champion == pytest.approx(99.7, abs=0.1)
    assert (found.challenger, found.change) == pytest.approx((3 * 99.75, 3), rel=1e-3)
    assert found.low is not None and found.high is not None
    assert 2.5 < found.low < 3 < found.high < 3.5
    assert found.state == "broken"


@pytest.mark.parametrize(("agents", "state"), [(2, "doubtful"), (10, "broken")])
def test_latencies_that_two_agents_share_by_chance_prove_nothing(agents: int, state: str) -> None:
    """Latencies are whole milliseconds, so their variance among few agents may be 0."""
    assert guard(MEDIAN, arms([100.0] * agents, [200.0] * agents)).state == state

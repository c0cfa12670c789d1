import pytest

from babylon.core.errors import ConfigError, WindowNotReadyError
from babylon.scoring.judge.cached_judge import Budget, BudgetLimits, BudgetSpentError
from babylon.scoring.judge.judge_client import Price
from babylon.scoring.judge.judgment import load_rubric, rubric_names
from babylon.store.judgments import Spent


def test_reservations_count_until_they_are_settled():
    budget = Budget(BudgetLimits(tokens=100))
    with budget.reserve(Spent(tokens=60)) as reservation:
        assert not budget.fits(Spent(tokens=50))
        reservation.cost = Spent(tokens=20)
    assert budget.spent == Spent(tokens=20)
    assert budget.fits(Spent(tokens=80)) and not budget.fits(Spent(tokens=81))


def test_a_request_that_fails_costs_nothing():
    budget = Budget(BudgetLimits(tokens=100))
    with pytest.raises(OSError), budget.reserve(Spent(tokens=60)):
        raise OSError
    assert budget.spent == Spent()


def test_what_was_spent_before_counts_and_the_message_says_of_what():
    budget = Budget(
        BudgetLimits(usd=1.0),
        BudgetLimits(usd=2.0),
        spent_on_window=Spent(usd=0.2),
        spent_today=Spent(usd=1.9),
    )
    with (
        pytest.raises(BudgetSpentError, match=r"of the day is spent: \$1\.9000 of \$2;") as refused,
        budget.reserve(Spent(usd=0.2)),
    ):
        pass
    assert isinstance(refused.value, WindowNotReadyError)  # the window waits


def test_prices_are_for_a_million_tokens():
    price = Price(prompt_usd=2.0, completion_usd=10.0)
    assert price.of(500_000, 100_000) == Spent(tokens=600_000, usd=pytest.approx(2.0))


def test_rubrics_are_found_by_name_or_path_and_their_version_follows_their_text(tmp_path):
    assert "trading-v1" in rubric_names()
    (tmp_path / "own.txt").write_text("Be kind.")
    own = load_rubric(str(tmp_path / "own.txt"))
    (tmp_path / "own.txt").write_text("Be strict.")
    assert own.version != load_rubric(str(tmp_path / "own.txt")).version
    assert own.version.startswith("own@")
    (tmp_path / "own.txt").write_text(" \n")
    with pytest.raises(ConfigError, match=r"own\.txt is empty"):
        load_rubric(str(tmp_path / "own.txt"))
    with pytest.raises(ConfigError, match="choose trading-v1"):
        load_rubric("trading-v99")

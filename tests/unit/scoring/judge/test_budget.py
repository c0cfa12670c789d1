import pytest

from babylon.core.errors import ConfigError, WindowNotReadyError
from babylon.scoring.judge.budget import Budget, BudgetLimits, BudgetSpentError
from babylon.scoring.judge.judge_client import Price
from babylon.scoring.judge.judgment import load_rubric, rubric_names
from babylon.store.judgments import Accounts, Spent


def test_each_limit_counts_what_was_spent_before():
    spent = Accounts(window=Spent(tokens=60), day=Spent(tokens=900, usd=1.0))
    assert Budget(window=BudgetLimits(tokens=100)).fits(spent, Spent(tokens=40))
    assert not Budget(window=BudgetLimits(tokens=100)).fits(spent, Spent(tokens=41))
    assert not Budget(day=BudgetLimits(tokens=1000)).fits(spent, Spent(tokens=101))
    assert not Budget(day=BudgetLimits(usd=1.5)).fits(spent, Spent(usd=0.6))
    assert Budget().fits(spent, Spent(tokens=10**12, usd=1e9))


def test_the_message_says_which_limit_and_what_was_spent_of_it():
    budget = Budget(window=BudgetLimits(usd=1.0), day=BudgetLimits(usd=2.0))
    spent = Accounts(window=Spent(usd=0.2), day=Spent(usd=1.9))
    with pytest.raises(
        BudgetSpentError, match=r"of the day is spent: \$1\.9000 of \$2;"
    ) as refused:
        budget.require(spent, Spent(usd=0.2))
    assert isinstance(refused.value, WindowNotReadyError)  # the window waits
    budget.require(spent, Spent(usd=0.05))


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

import math
import sys

import numpy as np
import pytest
from msgspec.structs import replace

from babylon.core.errors import ConfigError, ScoringError
from babylon.core.settings import JudgeSettings
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import Payoff
from babylon.core.types import Artifact, Rejection
from babylon.scoring.judge.budget import BudgetSpentError
from babylon.scoring.judge.judge_scorers import _by_heuristic
from babylon.scoring.rewards.heuristic import heuristic
from babylon.scoring.scorer import (
    SCORERS,
    Score,
    ScoringContext,
    load_scorer,
    require_scorer,
    rewards_json,
    score,
)
from tests.trajectories import a_trajectory


def trajectory(number, pnl_usd=0.0, **fields):
    return a_trajectory(
        f"t{number}", agent_id=f"a{number}", pnl_usd=pnl_usd, **{"steps": 10, **fields}
    )


THREE = [trajectory(1, 10.0), trajectory(2, 20.0), trajectory(3, 30.0)]


def test_heuristic_by_hand():
    scores = heuristic(
        [
            trajectory(1, pnl_usd=-50, drawdown_usd=80),  # worth -70
            trajectory(2, pnl_usd=150, drawdown_usd=80),  # worth 130
            trajectory(3, pnl_usd=0),
        ]
    )
    assert [s.value for s in scores] == pytest.approx([0, 1, 70 / 200])
    assert scores[0].components == {"pnl_usd": -50, "drawdown_usd": 80}


def test_heuristic_gives_each_step_its_payoff_and_takes_ten_dollars_for_a_failure():
    """Values 40 - 10 and 0: a range of 30."""
    paid = (Payoff(step=0, pnl_usd=40.0), Payoff(step=2, pnl_usd=0.0, failed=True))
    trader = replace(trajectory(1, pnl_usd=40.0), payoffs=paid)
    scores = heuristic([trader, trajectory(2)])
    assert [s.value for s in scores] == [1, 0]
    assert scores[0].rewards == pytest.approx({0: 40 / 30, 2: -10 / 30})
    assert scores[1].rewards == {}


def test_where_trades_lose_a_failure_is_worth_less_than_the_worst_trade_and_holding_most():
    def agent(number, *paid, failed=False, scenario_id="s"):
        steps = tuple(Payoff(step=n, pnl_usd=usd, failed=failed) for n, usd in enumerate(paid))
        own = trajectory(number, pnl_usd=sum(paid))
        return replace(own, payoffs=steps, scenario_id=scenario_id)

    agents = [
        agent(1, -100.0, -20.0),
        agent(2, -30.0, -60.0),
        agent(3, 0.0, 0.0),
        agent(4, 0.0, 0.0, failed=True),
        agent(5, -900.0, -900.0, scenario_id="another world"),
    ]
    first, second, idle, silent, _ = heuristic(agents)
    for step in (0, 1):
        worst = min(first.rewards[step], second.rewards[step])
        assert silent.rewards[step] < worst < idle.rewards[step]
    lost = 100.0 + 60.0 + 2 * 10.0
    assert (idle.value - silent.value) / (idle.value - first.value) == pytest.approx(lost / 120)


def test_heuristic_pays_for_profit_and_never_for_activity():
    spam = trajectory(1, pnl_usd=0.5, wins=1, trades=1, actions=10)
    trader = trajectory(2, pnl_usd=371, drawdown_usd=200, wins=2, trades=6, actions=6)
    idle, loser = trajectory(3), trajectory(4, pnl_usd=-90, drawdown_usd=120, actions=8)
    scores = [score.value for score in heuristic([spam, trader, idle, loser])]
    assert scores[1] == 1 and scores[3] == 0
    assert scores[0] - scores[2] == pytest.approx(0.5 / (371 - 50 + 90 + 30))


def test_one_lucky_trade_does_not_make_the_others_equal():
    """Distances from the median of $10 are 10, 10, 20 and 4,990; nine tenths of four are the third,
    three times 20 are below $100. The fifth counts as $110, 100 / 4990 of its distance, and its
    step comes as near to $10."""
    lucky = replace(trajectory(5, pnl_usd=5000.0), payoffs=(Payoff(step=0, pnl_usd=4990.0),))
    others = [trajectory(n, pnl_usd=usd) for n, usd in enumerate((-10.0, 0.0, 10.0, 20.0))]
    scores = heuristic([*others, lucky])
    assert [one.value for one in scores] == pytest.approx([0, 10 / 120, 20 / 120, 30 / 120, 1])
    assert scores[4].rewards == pytest.approx({0: (100 + 10 * (1 - 100 / 4990)) / 120})


@pytest.mark.parametrize("sign", [1, -1])
def test_the_step_that_makes_a_play_an_outlier_answers_for_it(sign: int) -> None:
    """Where all earn, one ruinous trade is the play's fault, and its other trades are as good."""

    def agent(number: int, *paid: float):
        steps = tuple(Payoff(step=n, pnl_usd=sign * usd) for n, usd in enumerate(paid))
        return replace(trajectory(number, pnl_usd=sign * sum(paid)), payoffs=steps)

    usual = [agent(n, *(30.0 + n + (step % 3) for step in range(10))) for n in range(7)]
    ruined = agent(7, *[33.0] * 4, -1070.0, *[33.0] * 5)
    found = heuristic([*usual, ruined])
    for step in range(10):
        others = [
            sign * (one.value - sum(one.rewards.values()) + one.rewards[step]) for one in found
        ]
        gap = others[-1] - sum(others[:-1]) / 7
        assert gap < -0.5 if step == 4 else abs(gap) < 0.1


def test_where_nearly_all_hold_a_trade_still_outweighs_spam():
    spam = [trajectory(n, pnl_usd=0.5) for n in range(6)]
    idle = [trajectory(n, pnl_usd=0.0) for n in range(6, 11)]
    scores = [one.value for one in heuristic([*spam, *idle, trajectory(11, pnl_usd=300.0)])]
    assert scores[11] == 1 and max(scores[:11]) < 0.01


def test_heuristic_of_equal_profits_is_neutral_and_of_nothing_is_nothing():
    assert [s.value for s in heuristic([trajectory(1, 7.0), trajectory(2, 7.0)])] == [0.5, 0.5]
    assert heuristic([]) == []


def test_dollars_that_differ_only_by_rounding_tie_and_their_steps_keep_the_scale_of_dollars():
    """The same $12.30, counted from different lifetime P&L; one agent bought a tick later."""
    bought = [(12.3, 0.0), (0.0, 12.3), (12.3, 0.0)]
    plays = [
        replace(
            trajectory(number, pnl_usd=(before + 12.3) - before),
            payoffs=tuple(Payoff(step=step, pnl_usd=usd) for step, usd in enumerate(paid)),
        )
        for number, (before, paid) in enumerate(zip((0.0, 1234.56, 99.1), bought, strict=True))
    ]
    assert len({play.pnl_usd for play in plays}) == 3
    scores = heuristic(plays)
    assert [one.value for one in scores] == [0.5] * 3
    assert [one.rewards for one in scores] == [
        pytest.approx({0: early / 100, 1: late / 100}) for early, late in bought
    ]
    cent = heuristic([trajectory(1, 7.0), trajectory(2, 7.02)])
    assert [one.value for one in cent] == [0, 1]


async def test_a_window_without_budget_whose_scores_tie_by_group_waits_for_the_judge():
    """Equal dollars in each world, but for rounding: the heuristic would teach nothing."""
    plays = [
        replace(trajectory(number, pnl_usd=usd), scenario_id=world)
        for number, (world, usd) in enumerate(
            [("a", 12.3), ("a", (1234.56 + 12.3) - 1234.56), ("b", 90.0), ("b", 90.0)]
        )
    ]
    assert len({one.value for one in heuristic(plays)}) == 3
    artifact = Artifact(uri="file:///x", sha256="0", rows=4, window_id="2025-11-14T09:00")
    context = ScoringContext(
        window_id=artifact.window_id, settings=load_settings(), store=None, artifact=artifact
    )
    spent = BudgetSpentError("spent")
    with pytest.raises(BudgetSpentError) as refused:
        await _by_heuristic(plays, context, spent)
    assert refused.value is spent


async def test_plain_and_async_scorers_give_floats_or_scores_with_components():
    async def later(trajectories):
        return [Score(t.pnl_usd, {"pnl": t.pnl_usd}) for t in trajectories]

    def now(trajectories):
        return [int(t.pnl_usd) for t in trajectories]

    assert [s.value for s in await score("now", now, THREE)] == [10.0, 20.0, 30.0]
    assert (await score("later", later, THREE))[2] == Score(30.0, {"pnl": 30.0})


@pytest.mark.parametrize("rewards", [{0: float("nan")}, {0: None}, {0: 10**400}, {"first": 1.0}])
async def test_a_reward_that_is_no_finite_number_of_a_step_names_scorer_and_trajectory(rewards):
    with pytest.raises(ScoringError, match=r"scorer mine .* trajectory t0: rewards must be finite"):
        await score("mine", lambda _: [Score(0.5, {}, rewards)], [trajectory(0)])


@pytest.mark.parametrize("unfit", [{"components": {"sharpe": float("nan")}}, {"low": -math.inf}])
async def test_a_part_of_a_score_that_is_not_finite_names_scorer_and_trajectory(unfit):
    with pytest.raises(ScoringError, match=r"scorer mine .* not finite for trajectory t0: leave"):
        await score("mine", lambda _: [Score(0.5, **unfit)], [trajectory(0)])


async def test_a_rejection_is_of_the_trajectory_that_it_was_returned_for():
    other = Rejection(trajectory_id="else", reason="mine", detail="")
    (found,) = await score("mine", lambda _: [other], [trajectory(0)])
    assert found == Rejection(trajectory_id="t0", reason="mine", detail="")


async def test_rewards_of_numpy_can_be_stored():
    given = Score(np.float32(0.5), {}, {np.int64(3): np.float32(0.25)})
    (found,) = scores = await score("mine", lambda _: [given], [trajectory(0)])
    assert found.rewards == {3: 0.25}
    assert rewards_json([trajectory(0)], scores) == {"t0": '{"3":0.25}'}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "high", 10**400])
async def test_a_score_that_is_no_finite_number_names_scorer_and_trajectory(bad):
    with pytest.raises(ScoringError, match=r"scorer mine returned .* for trajectory t2"):
        await score("mine", lambda trajectories: [1.0, bad, 3.0], THREE)


@pytest.mark.parametrize("returned", [[1.0], [], None, 3.0])
async def test_not_one_score_a_trajectory_is_an_error(returned):
    with pytest.raises(ScoringError, match=r"mine returned .* for 3 trajectories"):
        await score("mine", lambda trajectories: returned, THREE)


async def test_a_scorer_that_raises_is_an_error_never_a_low_score():
    async def judge(trajectories):
        raise TimeoutError("no answer")

    with pytest.raises(ScoringError, match=r"judge raised TimeoutError at test_re.* on 3 .*t1, t2"):
        await score("judge", judge, THREE)


def test_a_function_of_ones_own_is_found_by_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def flat(trajectories):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_scorer("my_rewards:flat")([]) == [1.0]
    with pytest.raises(ConfigError, match=r"my_rewards.py\) has no function 'steep'"):
        load_scorer("my_rewards:steep")
    sys.modules.pop("my_rewards")


@pytest.mark.parametrize("name", ["rulers", "", "module:", ":function"])
def test_an_unknown_scorer_is_refused_with_the_list_of_those_there_are(name):
    with pytest.raises(ConfigError, match=rf"scorer '{name}' is unknown: choose heu.* or"):
        load_scorer(name)


def test_a_module_that_does_not_import_is_named():
    with pytest.raises(ConfigError, match=r"module .no_such\.module. does not import"):
        load_scorer("no_such.module:function")


def test_the_built_in_scorers():
    names = {"heuristic", "ruler", "art-ruler", "feedback"}
    assert names == set(SCORERS)
    for name in SCORERS:
        assert callable(load_scorer(name))


async def test_a_scorer_that_asks_gets_a_context_and_its_metrics_stay(tmp_path):
    def spread(trajectories, context):
        context.metrics["seed"] = context.settings.seed
        return [t.pnl_usd for t in trajectories]

    artifact = Artifact(uri="file:///x", sha256="0", rows=3, window_id="2025-11-14T09:00")
    context = ScoringContext(
        window_id=artifact.window_id, settings=load_settings(seed=7), store=None, artifact=artifact
    )
    assert [s.value for s in await score("spread", spread, THREE, context)] == [10.0, 20.0, 30.0]
    assert context.metrics == {"seed": 7}


SERVED = {"model": "m", "base_url": "http://x/v1"}


@pytest.mark.parametrize(
    ("scorer", "changes"),
    [
        ("ruler", {"model": None}),
        ("art-ruler", {"model": None}),
        ("ruler", {"base_url": "https://me:hunter22@api.openai.com/v1"}),
        ("ruler", {"window_usd": 1, "panel": "b@http://me:hunter22@y/v1?key=hunter22"}),
    ],
)
def test_an_address_with_a_password_is_shown_without_it(scorer, changes):
    judge = JudgeSettings(**{**SERVED, "base_url": "http://me:hunter22@x/v1", **changes})
    with pytest.raises(ConfigError) as refused:
        require_scorer(scorer, judge)
    assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"scoring": {"scorer": "ruler"}}, "scorer 'ruler' needs a judge: set JUDGE_MODEL"),
        ({"scoring": {"scorer": "ruler"}, "judge": {"model": "m"}}, "set OPENAI_API_KEY"),
        (
            {"scoring": {"scorer": "ruler"}, "judge": {"model_path": "/nowhere"}},
            "holds no model",
        ),
        (
            {"scoring": {"scorer": "ruler"}, "judge": {"model": "m", "rubric": "none"}},
            "choose trading-v1",
        ),
        (
            {"scoring": {"scorer": "art-ruler"}, "judge": {"model_path": "/nowhere"}},
            "JUDGE_MODEL is not set",
        ),
        *(
            (
                {"scoring": {"scorer": "art-ruler"}, "judge": {**SERVED, limit: 1}},
                "art-ruler: .*keeps no account",
            )
            for limit in ("window_tokens", "window_usd", "day_tokens", "day_usd")
        ),
        ({"scoring": {"scorer": "heuristics"}}, "is unknown"),
    ],
)
def test_a_scorer_that_cannot_work_is_refused_beforehand(chosen, message):
    settings = load_settings(**chosen)
    with pytest.raises(ConfigError, match=message):
        require_scorer(settings.scoring.scorer, settings.judge)
    require_scorer("ruler", JudgeSettings(**SERVED))
    require_scorer("art-ruler", JudgeSettings(**SERVED))

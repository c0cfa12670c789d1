"""Panels of simulated judges whose errors are known, and people's answers."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from babylon.core.errors import ConfigError
from babylon.core.settings import JudgeSettings
from babylon.scoring.judge.judge_requirements import require_judge
from babylon.scoring.judge.panel import PanelGroup, judge_together, side_by_side
from babylon.scoring.judge.panel_members import panel_members
from babylon.scoring.judge.people import next_pair, people_groups, people_lines
from babylon.scoring.judge.validity import JudgedGroup, agreement, evidence
from babylon.store.people import PairAnswer

# judge → standard deviations of its own error, and of the error that all with "common" share
JUDGES = {"good": (0.1, 0.0), "poor": (0.5, 0.0)}
ALIKE = {"one": (0.05, 0.2), "same": (0.05, 0.2), "other": (0.2, 0.0)}


def window(random, judges, size=8, told=True, missing=()):
    truth = {f"t{random.random()}": random.gauss(0, 0.2) for _ in range(size)}
    common = {name: random.gauss(0, 1) for name in truth}
    opinions = {
        judge: {
            name: ((t if told else 0) + random.gauss(0, own) + shared * common[name], own)
            for name, t in truth.items()
        }
        for judge, (own, shared) in judges.items()
        if judge not in missing
    }
    return PanelGroup(outcomes={n: 100 * t for n, t in truth.items()}, opinions=opinions)


def learned(judges, windows=30, **options):
    random = Random(1)
    before = [[window(random, judges, **options)] for _ in range(windows)]
    return judge_together(list(judges), before, [window(random, judges, **options)])


def test_without_a_history_all_judges_weigh_the_same():
    found = learned(ALIKE, windows=0)
    assert list(found.weights.values()) == pytest.approx([1 / 3] * 3)


def test_the_judge_that_agrees_with_outcomes_gets_the_weight():
    weights = learned(JUDGES).weights
    assert weights["good"] > 0.8 and sum(weights.values()) == pytest.approx(1)


def test_judges_that_err_together_share_a_weight():
    weights = learned(ALIKE).weights
    assert weights["other"] > 0.4
    assert weights["one"] + weights["same"] == pytest.approx(1 - weights["other"])
    assert max(weights["one"], weights["same"]) < weights["other"]


def test_a_judge_that_is_worse_than_chance_is_left_out():
    random = Random(2)
    before = []
    for _ in range(30):
        one = window(random, {"good": (0.1, 0.0), "liar": (0.1, 0.0)})
        lies = {name: (-value, error) for name, (value, error) in one.opinions["liar"].items()}
        before.append([PanelGroup(outcomes=one.outcomes, opinions={**one.opinions, "liar": lies})])
    assert judge_together(["good", "liar"], before, []).weights["liar"] == 0


def test_a_panel_is_better_than_its_members():
    random, judges = Random(3), {name: (0.2, 0.0) for name in "abc"}
    windows = [[window(random, judges)] for _ in range(40)]
    together = [group for one in judge_together("abc", windows, []).before for group in one]
    alone = [
        JudgedGroup(
            opinions=tuple(o for o, _ in one.opinions["a"].values()),
            errors=(0.2,) * len(one.outcomes),
            outcomes=tuple(one.outcomes.values()),
        )
        for (one,) in windows
    ]
    assert agreement(together).correlation > agreement(alone).correlation + 0.1


def test_judges_that_know_nothing_reach_the_evidence_in_few_windows():
    """Each window is weighed by windows before it only, so its evidence stays honest."""
    proved = 0
    for seed in range(40):
        random, judges = Random(seed), {"a": (0.2, 0.0), "b": (0.2, 0.0)}
        before = [[window(random, judges, told=False)] for _ in range(12)]
        groups = [group for one in judge_together("ab", before, []).before for group in one]
        proved += evidence(groups, []) >= 20
    assert proved <= 4


def test_a_judge_that_lacks_a_trajectory_or_a_window_takes_no_part_there():
    random = Random(4)
    full = window(random, JUDGES)
    lost = next(iter(full.outcomes))
    partly = {name: one for name, one in full.opinions["good"].items() if name != lost}
    group = PanelGroup(outcomes=full.outcomes, opinions={**full.opinions, "good": partly})
    (combined,) = judge_together(
        list(JUDGES), [[window(random, JUDGES, missing=("poor",))]], [group]
    ).groups
    assert set(combined.group.trajectory_ids) == set(full.outcomes)
    assert min(combined.group.opinions) >= 0 and max(combined.group.opinions) <= 1
    assert 0 < combined.disagreement < 2


def test_groups_of_several_judges_are_joined_by_their_trajectories():
    def group(names):
        return JudgedGroup(
            opinions=tuple(0.1 * at for at in range(len(names))),
            errors=(0.1,) * len(names),
            outcomes=tuple(float(ord(name)) for name in names),
            trajectory_ids=tuple(names),
        )

    joined = side_by_side({"a": [group("xyz"), group("mn")], "b": [group("nm"), group("xz")]})
    assert [sorted(one.outcomes) for one in joined] == [["x", "y", "z"], ["m", "n"]]
    assert [sorted(one.opinions) for one in joined] == [["a", "b"], ["a", "b"]]
    assert joined[1].opinions["b"]["n"][0] == 0.0


def test_members_of_a_panel_and_their_keys(tmp_path: Path):
    judge = JudgeSettings(
        model="first", api_key="ours", panel=f"second, third@http://host:1/v1 ,{tmp_path}"
    )
    first, second, third, local = panel_members(judge)
    assert (first, second.model, second.base_url) == (judge, "second", judge.base_url)
    assert second.api_key.get_secret_value() == "ours"
    assert (third.model, third.base_url) == ("third", "http://host:1/v1")
    assert third.api_key is None  # ours is sent to no other server
    assert (local.model, local.model_path) == (None, tmp_path)


def test_each_member_of_a_panel_has_its_own_prices():
    panel = "second=0.05/0.4,third@http://host:1/v1=2/8, free"
    judge = JudgeSettings(model="first", prompt_usd=1.0, completion_usd=4.0, panel=panel)
    members = panel_members(judge)
    assert [one.model for one in members] == ["first", "second", "third", "free"]
    assert members[2].base_url == "http://host:1/v1"
    prices = [(one.prompt_usd, one.completion_usd) for one in members]
    assert prices == [(1.0, 4.0), (0.05, 0.4), (2.0, 8.0), (0.0, 0.0)]


def test_an_address_in_a_panel_may_hold_an_equals_sign():
    panel = "a@http://host/v1?version=2=2/8,b@http://host/v1?version=2"
    _, priced, free = panel_members(JudgeSettings(model="first", panel=panel))
    assert {priced.base_url, free.base_url} == {"http://host/v1?version=2"}
    assert (priced.prompt_usd, free.prompt_usd) == (2.0, 0.0)


@pytest.mark.parametrize("prices", ["", "1", "1/x", "-1/2", "1/2/3"])
def test_prices_that_cannot_be_read_are_named(prices):
    with pytest.raises(ConfigError, match="no prices after '='"):
        panel_members(JudgeSettings(model="first", panel=f"second={prices}"))


def test_a_limit_in_dollars_needs_the_prices_of_every_model(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    limited = JudgeSettings(
        model="first",
        base_url="http://host:1/v1",
        prompt_usd=1.0,
        day_usd=1.0,
        panel=f"second=1/2,{tmp_path}",
    )
    require_judge("ruler", limited)
    for changes, missing in (
        ({"prompt_usd": 0.0}, "JUDGE_PROMPT_USD_PER_MTOK"),
        ({"panel": "second=1/2,third"}, "JUDGE_PANEL=third="),
        ({"cheaper_model": "small"}, "JUDGE_CHEAPER_PROMPT_USD_PER_MTOK"),
    ):
        unpriced = limited.model_copy(update=changes)
        with pytest.raises(ConfigError, match=missing):
            require_judge("ruler", unpriced)
        require_judge("ruler", unpriced.model_copy(update={"day_usd": None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"panel": "second@https://api.openai.com/v1"}, "set JUDGE_PANEL_API_KEY"),
        ({"panel": "{empty}"}, "JUDGE_PANEL=.* holds no model"),
        ({"model": None, "model_path": "{own}", "base_url": "https://api.openai.com/v1",
          "panel": "second"}, "set OPENAI_API_KEY"),
    ],
)  # fmt: skip
def test_a_member_that_cannot_be_asked_is_refused_beforehand(changes, message, tmp_path: Path):
    own, empty = tmp_path / "own", tmp_path / "empty"
    own.mkdir()
    empty.mkdir()
    (own / "config.json").write_text("{}")
    named = {k: v and v.format(own=own, empty=empty) for k, v in changes.items()}
    judge = {"model": "first", "base_url": "http://host:1/v1"} | named
    with pytest.raises(ConfigError, match=message):
        require_judge("ruler", JudgeSettings(**judge))
    key = {"panel_api_key": "k", "api_key": "k", "panel": named["panel"].replace(str(empty), "x")}
    require_judge("ruler", JudgeSettings(**judge | key))


@pytest.mark.parametrize("panel", ["first@http://other:2/v1", "second,second=1/2", "{own},{own}"])
def test_two_judges_of_one_name_are_refused_because_they_would_be_one(panel, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    judge = JudgeSettings(model="first", base_url="http://host:1/v1")
    with pytest.raises(ConfigError, match="is named twice"):
        require_judge("ruler", judge.model_copy(update={"panel": panel.format(own=tmp_path)}))


def answer(better, worse, person="ann", first=None, scenario="s"):
    return PairAnswer(
        window_id="w",
        scenario_id=scenario,
        person=person,
        better=better,
        worse=worse,
        first=first or better,
    )


def test_answers_of_people_become_opinions():
    answers = [answer("a", "b"), answer("b", "c", first="c"), answer("a", "c"), answer("a", "gone")]
    (group,) = people_groups(answers, {"a": 5.0, "b": 1.0, "c": -4.0})
    ranked = dict(zip(group.trajectory_ids, group.opinions, strict=True))
    assert ranked["a"] > ranked["b"] > ranked["c"]
    assert group.outcomes == (5.0, 1.0, -4.0) and min(group.errors) > 0


def test_lines_of_people_count_pairs_with_outcomes():
    answers = [answer("a", "b"), answer("c", "a"), answer("a", "c", "bob"), answer("a", "x", "bob")]
    ann, bob = people_lines(answers, {"a": 1.0, "b": 0.0, "c": 0.0})
    assert (ann.person, ann.pairs, ann.decided, ann.right) == ("ann", 2, 2, 0.5)
    assert (bob.pairs, bob.decided, bob.right) == (2, 1, 1.0) and bob.low < 0.5
    (carl,) = people_lines([answer("q", "r", "carl")], {})
    assert carl.right is None
    equal = {"q": 12.3, "r": (1234.56 + 12.3) - 1234.56}  # the same dollars, but for rounding
    (dora,) = people_lines([answer("q", "r", "dora")], equal)
    assert (dora.decided, dora.right) == (0, None)


def test_pairs_compare_every_trajectory_twice_and_then_neighbours():
    names = "abcde"
    group = JudgedGroup(
        opinions=(0.1, 0.2, 0.3, 0.9, 0.95),
        errors=(0.1,) * 5,
        outcomes=(0.0,) * 5,
        trajectory_ids=tuple(names),
    )
    asked: set[frozenset[str]] = set()
    met = []
    while (pair := next_pair([group], asked, "seed")) is not None:
        assert frozenset(pair) not in asked
        asked.add(frozenset(pair))
        met += pair
    assert min(np.unique(met, return_counts=True)[1]) >= 2
    assert frozenset("de") in asked and 5 <= len(asked) <= 9

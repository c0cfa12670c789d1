"""People who saw the outcomes prove no judge of a window that they did not judge."""

from random import Random
from types import SimpleNamespace

import pytest

from babylon.scoring.judge import judge_panel as module
from babylon.scoring.judge.judge_panel import MemberJudgment, together
from babylon.scoring.judge.judgment import JudgedScore, Judgments, Level
from babylon.scoring.judge.validity import JudgedGroup, evidence
from babylon.store.judge_validity import JudgeIdentity, WindowValidity
from babylon.store.people import PairAnswer

NAMES = tuple("abcdef")
EARLIER = [f"2025-11-1{day}T00:00" for day in range(1, 7)]
NOW = "2025-11-17T00:00"


def group(window, judge):
    """A group of a judge that knows nothing. A play earns its place among ``NAMES``."""
    random = Random(f"{window}:{judge}")
    ids = tuple(f"{window}:{name}" for name in NAMES)
    opinions = tuple(random.random() for _ in ids)
    outcomes = tuple(float(number) for number in range(len(ids)))
    return JudgedGroup(
        opinions=opinions, errors=(0.05,) * len(ids), outcomes=outcomes, trajectory_ids=ids
    )


def member(name):
    by = JudgeIdentity(judge=name, method="ruler", rubric="r")
    own = group(NOW, name)
    scores = [
        JudgedScore(trajectory_id=one, score=said, low=0.0, high=1.0, reasons=(), seen="")
        for one, said in zip(own.trajectory_ids, own.opinions, strict=True)
    ]
    judgments = Judgments(
        scores=tuple(scores),
        rejected=(),
        groups=(own,),
        canaries=(),
        level=Level.FULL,
        reliability=1.0,
        requests=0,
        tokens=0,
        usd=0.0,
    )
    before = [WindowValidity(window_id=one, by=by, groups=[group(one, name)]) for one in EARLIER]
    return MemberJudgment(by=by, judgments=judgments, before=before[::-1])


def answers(windows):
    return [
        PairAnswer(
            window_id=window,
            scenario_id="s",
            person="ann",
            better=f"{window}:{better}",
            worse=f"{window}:{worse}",
            first=f"{window}:{better if (low + high) % 2 else worse}",
        )
        for window in windows
        for low, worse in enumerate(NAMES)
        for high, better in enumerate(NAMES)
        if low < high
    ]


@pytest.mark.parametrize(("answered", "with_people"), [(EARLIER, False), ([*EARLIER, NOW], True)])
async def test_people_prove_only_judgments_in_which_they_take_part(
    answered, with_people, monkeypatch
):
    async def read(store, windows):
        return [one for one in answers(answered) if one.window_id in windows]

    monkeypatch.setattr(module, "read_answers", read)
    found = await together(SimpleNamespace(), NOW, [member("one"), member("two")])
    history = [group for groups in found.before.values() for group in groups]
    assert (evidence([*found.judgments.groups, *history], ()) >= 20) == with_people
    assert ("people" in found.by.judge) == with_people

"""The judge sees a reply as the last step of the play before it, and no outcome of it."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from babylon.core.settings import JudgeSettings
from babylon.core.trajectories import Call
from babylon.scoring.judge import judge_replies as module
from babylon.scoring.judge.condense import condense
from babylon.scoring.judge.judge_replies import as_play
from babylon.scoring.judge.judgment import GroundTruth
from tests.judged import judged, step


@dataclass(frozen=True)
class Decision:
    trajectory_id: str
    call: Call


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 2, 3), (0, 5, 9)])  # as games count
def test_a_reply_takes_the_place_of_what_was_said_and_of_all_that_came_of_it(
    numbers: tuple[int, int, int],
) -> None:
    play = judged(
        "one",
        75.0,
        (
            step(numbers[0], said="Early words", prompt="m1 at 0.40"),
            step(
                numbers[1], said="RECORDED", prompt="m1 at 0.50", action="BUY", result={"pnl": 75.0}
            ),
            step(numbers[2], said="LATER", prompt="m1 at 0.90"),
        ),
    )
    point = Decision("t-one", Call(step=numbers[1], messages=(), response="RECORDED"))
    shown = as_play(play, point, 3, "My own idea")
    text = condense(shown, (), 2000)
    assert "My own idea" in text and "m1 at 0.50" in text and "Early words" in text
    assert not any(word in text for word in ("RECORDED", "LATER", "0.90", "75"))
    assert shown.trajectory.trajectory_id == f"t-one#{numbers[1]}.3"
    assert shown.trajectory.scenario_id == f"t-one#{numbers[1]}"


def test_a_reply_is_shown_whole() -> None:
    """What two long replies differ in may stand in their middle."""
    long = "The same beginning. " * 40 + "I refund nothing." + "The same end. " * 40
    play = judged("one", 0.0, (step(0, said="RECORDED", prompt="m1 at 0.40"),))
    point = Decision("t-one", Call(step=0, messages=(), response="RECORDED"))
    assert "I refund nothing." in condense(as_play(play, point, 0, long), (), 10**6, wanted=0)


async def test_plays_are_read_and_cut_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop renews the lease of the window."""
    threads: list[threading.Thread] = []

    def read(*arguments: object) -> object:
        threads.append(threading.current_thread())
        return [judged("one", 75.0)], GroundTruth(), []

    def cut(*arguments: object) -> object:
        threads.append(threading.current_thread())
        raise ArithmeticError("far enough")

    monkeypatch.setattr(module, "read_evidence", read)
    monkeypatch.setattr(module, "as_play", cut)
    point = Decision("t-one", Call(step=0, messages=(), response="RECORDED"))
    store, scored = SimpleNamespace(home=None), SimpleNamespace(artifact=None)
    judge = JudgeSettings(model="m", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ArithmeticError, match="far enough"):
        await module.judge_replies(store, judge, scored, [point], [["a", "b"]])
    assert len(threads) == 2 and threading.main_thread() not in threads


async def test_equal_replies_are_judged_once_and_alone_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def plays(home: object, scored: object, points: object, replies: object) -> object:
        asked.append(replies)
        return [], GroundTruth()

    monkeypatch.setattr(module, "_plays", plays)
    point = Decision("t-one", Call(step=0, messages=(), response="RECORDED"))
    store, judge = SimpleNamespace(home=None), JudgeSettings(model="m", base_url="http://x/v1")
    replies = [["a", "a"], ["a", "b", "a"]]
    found = await module.judge_replies(store, judge, None, [point, point], replies)
    assert (asked, found) == ([[[], ["a", "b"]]], [None, None])

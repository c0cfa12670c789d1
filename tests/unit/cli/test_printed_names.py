"""Ids of the game's own rows and of imported traces may hold what a terminal obeys."""

import pytest

from babylon.cli.judge_page import ask_pair, print_details, print_group
from babylon.cli.output import fail
from babylon.core.errors import ScoringError
from babylon.ops.pages.pairs import PairShown, PlayShown
from babylon.store.scores import ScoredRow

ORDER = "\x1b]0;owned\x07"


def scored(score: float) -> ScoredRow:
    return ScoredRow(
        trajectory_id=f"t{ORDER}",
        agent_id=f"a{ORDER}",
        scenario_id=f"s{ORDER}",
        scorer="ruler",
        score=score,
    )


def test_no_id_of_a_play_gives_the_terminal_an_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [scored(0.9), scored(0.1)]
    print_group(group[0].scenario_id, group, group)
    print_details(group[0])
    play = PlayShown(trajectory_id=f"t{ORDER}", agent_id="a", pnl_usd=1.0, lines=())
    monkeypatch.setattr("builtins.input", lambda _: "q")
    ask_pair(PairShown(window_id="w", plays=(play, play), truth=(), answered=0))
    fail(ScoringError(f"the first t{ORDER}: refused"), json=False)
    printed = "".join(capsys.readouterr())
    assert printed.count("owned") >= 8 and "\x1b" not in printed and "\x07" not in printed

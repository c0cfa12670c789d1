"""The table of scenarios tells nothing of play that is not published."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.home import Home
from babylon.core.types import Claim, Scored
from babylon.dataset.scenarios import scenario_rows
from babylon.dataset.trajectories import Consent, Selection
from babylon.evaluation.rebuild.recorded import RecordedRow
from babylon.store.published import Withheld
from tests.unit.evaluation.rebuild import test_rebuild_fleet
from tests.unit.evaluation.rebuild.test_rebuild_live import row, sees

NOBODY = Selection(agents=Consent(()))


def rows_of(path: Path, rows: list[RecordedRow], selection: Selection) -> list[dict[str, Any]]:
    columns = ("trajectory_id", "agent_id", "window_id", "scenario_id", "pnl_usd")
    written = [
        {
            **{name: getattr(one, name) for name in columns},
            "game_json": msgspec.json.encode(one.steps).decode(),
            "knowledge_json": msgspec.json.encode(
                {"game_knowledge": one.knowledge, "market_outcomes": one.outcomes}
            ).decode(),
        }
        for one in rows
    ]
    home = Home(path)
    window = rows[0].window_id
    scored = Scored(
        claim=Claim(window_id=window, epoch=1, owner="test"),
        artifact=write_artifact(home, pl.DataFrame(written), window_id=window),
        eligible=len(rows), agents=len(rows), scorer="heuristic", avg_reward=0.5,
    )  # fmt: skip
    return scenario_rows(home, scored, selection)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(agents=Consent(("bo",))),
        Selection(withheld=Withheld(agents=frozenset({"ann"}))),
        Selection(withheld=Withheld(trajectories=frozenset({"t-ann"}))),
    ],
)
def test_a_live_scenario_holds_no_balance_minute_or_price_of_play_that_is_not_published(
    tmp_path: Path, selection: Selection
) -> None:
    ann = [sees(minute, "SECRET", 77.125) for minute in range(4)]
    for step in ann:
        step["environmentState"]["agentBalance"] = 1234.56
    rows = [row("ann", *ann), row("bo", sees(1.0, "X", 10.0), sees(2.0, "X", 11.0))]
    (before,) = rows_of(tmp_path, rows, Selection())
    assert "1234.56" in before["knowledge_json"] and before["ticks"] == 4
    (after,) = rows_of(tmp_path, rows, selection)
    assert (after["trajectory_ids"], after["ticks"], after["perps"]) == (["t-bo"], 2, 1)
    assert not any(text in str(after) for text in ("1234.56", "77.125", "SECRET"))
    assert rows_of(tmp_path, rows, NOBODY) == []


@pytest.mark.parametrize("withheld", [{"agents": {"a"}}, {"trajectories": {"a"}}])
def test_a_shared_market_does_not_come_back_after_one_of_its_plays_was_taken_down(
    tmp_path: Path, withheld: dict[str, set[str]]
) -> None:
    rows = test_rebuild_fleet.shared_rows(lambda _: None)
    (before,) = rows_of(tmp_path, rows, Selection())
    assert before["players"] == ["a", "b"]
    names = Withheld(**{kind: frozenset(ids) for kind, ids in withheld.items()})
    assert rows_of(tmp_path, rows, Selection(withheld=names)) == []


def test_a_copy_of_a_market_of_which_no_play_is_published_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_rebuild_fleet, "NAMES", ("a",))
    rows = test_rebuild_fleet.shared_rows(lambda _: None)
    (before,) = rows_of(tmp_path, rows, Selection())
    assert before["players"] == [] and before["trajectory_ids"] == ["a"]
    assert rows_of(tmp_path, rows, NOBODY) == []

"""A comment teaches the decision that it is about."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.home import Home
from babylon.core.trajectories import TRAJECTORY_SCHEMA, Call, TrainingRow, trajectory_row
from babylon.stages import words
from babylon.store.feedback import Feedback
from tests.judged import judged
from tests.unit.quality.rows import call, step


def returns(value: object) -> Callable[..., Any]:
    async def known(*_: object) -> object:
        return value

    return known


async def test_a_comment_on_a_call_is_about_the_step_that_names_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: dict[int, object] = {3: None, 4: "call-4", 5: ["a game's own"]}
    steps = [step(number, llmCalls=[call(callId=name, model=7)]) for number, name in ids.items()]
    one = judged("one", 7.5, steps).trajectory
    frame = pl.DataFrame(
        [trajectory_row(one, game_json=json.dumps(steps), knowledge_json="{}")],
        schema=TRAJECTORY_SCHEMA,
    )
    artifact = write_artifact(Home(tmp_path), frame, window_id="2025-11-14T09:00")
    given = [
        Feedback(trajectory_id="t-one", call_id="call-4", comment="TOO-LATE"),
        Feedback(trajectory_id="t-one", call_id="call-9", comment="OF-NO-STEP"),
        Feedback(trajectory_id="t-one", call_id="call-4", step=3, comment="OF-STEP-3"),
        Feedback(trajectory_id="t-one", comment="OF-THE-WHOLE"),
    ]
    monkeypatch.setattr(words, "known_feedback", returns(given))
    monkeypatch.setattr(words, "window_scores", returns([]))
    calls = tuple(Call(step=number, messages=(), response=f"r{number}") for number in (3, 4, 5))
    row = TrainingRow(trajectory_id="t-one", agent_id="a", scenario_id="s", score=0.5, calls=calls)
    claim = SimpleNamespace(window_id="2025-11-14T09:00")
    scored: Any = SimpleNamespace(claim=claim, artifact=artifact)
    store: Any = None
    found = await words.words_for(store, Home(tmp_path), scored, [row], "sdpo")
    said = {f"r{number}": text.text for number, text in zip((3, 4, 5), found, strict=True)}
    assert [name for name, text in said.items() if "TOO-LATE" in text] == ["r4"]
    assert [name for name, text in said.items() if "OF-STEP-3" in text] == ["r3"]
    assert [name for name, text in said.items() if "OF-THE-WHOLE" in text] == ["r3", "r4", "r5"]
    assert not any("OF-NO-STEP" in text for text in said.values())

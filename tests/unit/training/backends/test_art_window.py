"""ART's trainers get the trainable calls of a window, and no secrets."""

import re
from pathlib import Path
from typing import Any

import pytest

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.llm_calls import Message
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import Call, TrainingRow
from babylon.training.backends import art_window as module
from babylon.training.backends.art_window import ArtLimits, ArtWindow, art_window, known_secrets

ROOT = Path(__file__).parents[4]
EXACT = {"prompt_token_ids": (1, 2, 3), "completion_token_ids": (4, 5), "logprobs": (-0.1, -0.2)}


def row(name: str, score: float, *calls: dict[str, Any], group: str = "s") -> TrainingRow:
    return TrainingRow(
        trajectory_id=name,
        agent_id=name,
        scenario_id=group,
        score=score,
        calls=tuple(
            Call(
                **{
                    "step": step,
                    "messages": (Message(role="user", content="m1 0.50"),),
                    "response": "buy",
                    **EXACT,
                    **changes,
                }
            )
            for step, changes in enumerate(calls or ({},))
        ),
    )


def chosen(*rows: TrainingRow, **limits: Any) -> ArtWindow:
    allowed = {"context": 100, "max_missing_logprobs": 1.0, "stale": {3}, "secrets": (), **limits}
    return art_window(rows, ArtLimits(**allowed))


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"temperature": 0.0}, {"greedy": 1}),
        ({"temperature": 0.7}, {"untrainable": 1}),  # ART's loss is that of temperature 1
        ({"top_p": 0.9}, {"truncated": 1}),
        ({"untrainable": "top_k"}, {"truncated": 1}),
        ({"untrainable": "penalties"}, {"untrainable": 1}),
        ({"logprobs": None}, {"untrainable": 1}),
        ({"completion_token_ids": (), "logprobs": ()}, {"empty": 1}),
        ({"prompt_token_ids": tuple(range(99))}, {"too_long": 1}),
        ({"response": "mail me: ann@example.org"}, {"untrainable": 1}),
        ({"reasoning": "ask ann@example.org"}, {"untrainable": 1}),
        (
            {"tool_calls": ({"function": {"name": "f", "arguments": '{"ann@example.org":1}'}},)},
            {"untrainable": 1},
        ),
    ],
)
def test_unsendable_calls_are_left_out(change: dict[str, Any], count: dict[str, int]) -> None:
    window = chosen(row("a", 1.0, {}, change), row("b", 0.0))
    assert [len(row.calls) for row in window.rows] == [1, 1]
    assert (window.counts["calls"], window.counts["tokens"]) == (2, 4)
    counted = {name: getattr(window.excluded, name) for name in window.excluded.__slots__}
    assert {name: number for name, number in counted.items() if number} == count


def test_calls_of_policies_that_are_too_old_are_left_out_and_counted() -> None:
    stale = {"policy_version": 3}
    window = chosen(row("a", 1.0, {}, stale), row("b", 0.0, {"policy_version": 4}, stale))
    assert (window.counts["calls"], window.counts["calls_too_stale"]) == (2, 2)


def test_only_groups_with_differing_scores_are_sent() -> None:
    window = chosen(
        row("a", 1.0), row("b", 0.0), row("c", 1.0, group="tied"), row("d", 1.0, group="tied")
    )
    assert window.trajectory_ids == ("a", "b")
    assert window.counts["groups_without_signal"] == 1
    with pytest.raises(WindowNotReadyError, match="differing scores and a trainable call"):
        chosen(row("a", 1.0), row("b", 0.0, {"temperature": 0.0}))


def test_too_many_calls_without_logprobs_are_refused() -> None:
    rows = (row("a", 1.0, {}, {"logprobs": None}), row("b", 0.0, {}, {}))
    assert chosen(*rows, max_missing_logprobs=0.25).counts["calls_unlogged"] == 1
    with pytest.raises(WindowNotReadyError, match=r"1 of 4 calls .*allowed are 20%"):
        chosen(*rows, max_missing_logprobs=0.2)


def test_what_stays_on_this_machine_is_not_changed() -> None:
    rows = (row("a", 1.0, {"response": "ann@example.org"}), row("b", 0.0))
    assert chosen(*rows, secrets=None).rows == rows


def test_secrets_in_tools_and_in_the_names_of_fields_are_redacted() -> None:
    mail = {"ann@example.org": ["bob@example.org"]}
    change = {"tools": (mail,), "messages": ({"role": "user", "content": "Go.", "x": mail},)}
    sent = chosen(row("a", 0.0, change), row("b", 1.0))
    (call,) = sent.rows[0].calls
    assert call.tools == ({"[REDACTED:email]": ["[REDACTED:email]"]},)
    assert call.messages[0]["x"] == call.tools[0]
    sent = chosen(row("a", 0.0, {"tools": (mail,)}), row("b", 1.0))
    assert sent.counts["calls_redacted"] == 1


def test_a_secret_that_only_the_tokens_of_a_reply_hold_stays_at_home() -> None:
    told = {4: "sk-abcdefghijkl", 5: "mnop1234", 6: "BUY"}
    rows = (
        row("a", 1.0, {}, {"completion_token_ids": (6, 6)}),
        row("b", 0.0, {"completion_token_ids": (6, 6)}),
    )
    window = chosen(*rows, decode=lambda ids: "".join(told[i] for i in ids))
    assert window.counts["calls_with_secrets"] == 1 and window.counts["calls"] == 2


def test_a_missed_secret_keeps_everything_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "redact", lambda text, known: text)
    secret = {"messages": (Message(role="system", content="key sk-abcdefghijklmnop1234"),)}
    with pytest.raises(TrainingError, match=r"step 1 of trajectory a .*\(key\).*nothing was sent"):
        chosen(row("a", 1.0, {}, secret), row("b", 0.0))


def test_own_credentials_are_known_by_value() -> None:
    settings = load_settings(database={"url": "postgresql://u:p@localhost/game"})
    environment = {
        "OPENAI_API_KEY": "plain-words-as-a-key",
        "SHORT_TOKEN": "abc",
        "HOME": "/root/x",
    }
    assert known_secrets(settings.database, environment) == {
        "plain-words-as-a-key",
        "postgresql://u:p@localhost/game",
    }
    long = load_settings(database={"url": "postgresql://u:long%2Fpassword@localhost/game"})
    assert "long/password" in known_secrets(long.database, {})


def test_art_is_imported_by_nothing_that_runs_before_a_window_is_sent() -> None:
    """Imports at the start of a line run at once, indented ones when their function runs."""
    at_once = re.compile(r"^(from|import) (art\b|babylon\.art\b|.*\bart_client\b)", re.MULTILINE)
    importers = {
        str(path.relative_to(ROOT))
        for package in ("babylon", "flows", "tasks", "blocks")
        for path in (ROOT / package).rglob("*.py")
        if at_once.search(path.read_text())
    }
    assert importers == {
        "babylon/art/backend.py",
        "babylon/training/backends/art_client.py",
    }

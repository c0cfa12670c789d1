"""The objectives of an update on disk: which phases run, what they report, and resumption."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from babylon.core.errors import WindowNotReadyError
from babylon.core.learning_settings import Objective
from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.core.types import Claim, Scored
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.training import progress_file as journal
from babylon.training.grpo.train_report import TrainReport
from babylon.training.preferences.config import PreferenceConfig
from babylon.training.preferences.objective import Preferences
from babylon.training.preferences.preference_report import PreferenceReport
from babylon.training.processes.job import JobDirectory
from babylon.training.update import update_checkpoint
from babylon.training.update_result import Update, update_metrics
from tests.unit.training.test_update import CONFIG, MESSAGES, logits, rows


def replies(parent: Path, **values: float) -> tuple[PromptReplies, ...]:
    """Replies to the window's prompt, each with its value."""
    _, tokenizer = load_policy(parent)
    given = values or {"buy": 2.0, "sell": -1.0, "wait": 0.0}
    return (
        PromptReplies(
            trajectory_id="asked",
            step=0,
            prompt_token_ids=tuple(render_prompt(tokenizer, list(MESSAGES))),
            replies=tuple(
                ValuedReply(
                    completion_token_ids=(*tokenizer.encode(text), tokenizer.eos_token_id),
                    value=value,
                )
                for text, value in given.items()
            ),
            temperature=1.0,
            policy_version=0,
        ),
    )


def update(
    parent: Path, target: Path, objective: Objective, score: float = 1.0, **changes: Any
) -> Update:
    given = changes.pop("replies", None)
    preferences = Preferences(
        objective=objective, replies=replies(parent) if given is None else given
    )
    return update_checkpoint(
        parent,
        rows(score),
        target,
        tuning="lora",
        config=changes.pop("config", CONFIG),
        preferences=preferences,
        **changes,
    )


def test_each_objective_reports_its_phases_and_consumes_what_it_used(
    parent: Path, tmp_path: Path
) -> None:
    found = {}
    for name in ("grpo", "dpo", "kto", "grpo+dpo"):
        made = update(parent, tmp_path / name, name)  # type: ignore[arg-type]
        found[name] = type(made.report), made.preferences is not None, made.trajectory_ids
    assert found == {
        "grpo": (TrainReport, False, ("buy", "hold")),
        "dpo": (PreferenceReport, False, ("asked",)),
        "kto": (PreferenceReport, False, ("buy", "hold")),
        "grpo+dpo": (TrainReport, True, ("buy", "hold", "asked")),
    }
    places = [logits(tmp_path / name) for name in found]
    assert all(
        (one - other).abs().max() > 1e-4 for i, one in enumerate(places) for other in places[:i]
    )


def test_a_phase_that_teaches_nothing_leaves_the_other_alone(parent: Path, tmp_path: Path) -> None:
    tied = update(parent, tmp_path / "pairs", "grpo+dpo", score=0.0)
    assert isinstance(tied.report, PreferenceReport) and tied.trajectory_ids == ("asked",)
    equal = replies(parent, buy=1.0, sell=1.0)
    scores = update(parent, tmp_path / "scores", "grpo+dpo", replies=equal)
    assert isinstance(scores.report, TrainReport) and scores.preferences is None
    with pytest.raises(WindowNotReadyError, match=r"PREFERENCE_MARGIN.*differing scores"):
        update(parent, tmp_path / "none", "grpo+dpo", score=0.0, replies=equal)
    assert not (tmp_path / "none").exists()


def test_a_second_phase_that_was_killed_goes_on_without_the_first(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, iterations=3)
    whole = update(parent, tmp_path / "whole", "grpo+dpo", config=config)
    monkeypatch.setattr(journal, "PATIENCE", 0)
    counts: list[int] = []

    def stop(done: int, total: int) -> None:
        counts.append(done)
        if counts == [1, 2, 3, 1, 2]:  # the third step of the second phase is still to come
            raise InterruptedError

    place = {"config": config, "progress_directory": tmp_path / "progress"}
    with pytest.raises(InterruptedError):
        update(parent, tmp_path / "ended", "grpo+dpo", progress=stop, **place)
    steps: list[int] = []
    resumed = update(
        parent,
        tmp_path / "ended",
        "grpo+dpo",
        progress=lambda done, _: steps.append(done),
        **place,
    )
    assert steps[0] > 1 and len(steps) <= 2
    assert resumed.trajectory_ids == whole.trajectory_ids
    assert resumed.report.kl_after == whole.report.kl_after
    gap = (logits(tmp_path / "ended") - logits(tmp_path / "whole")).abs().max()
    assert gap < 1e-6


def test_metrics_tell_the_phases_apart(parent: Path, tmp_path: Path) -> None:
    claim = Claim(window_id="2025-11-14T09:00", epoch=1, owner="test")
    scored: Any = Scored(
        claim=claim,
        artifact=None,
        eligible=2,
        agents=2,
        scorer="x",
        avg_reward=0.5,  # type: ignore[arg-type]
    )
    both = update_metrics(update(parent, tmp_path / "both", "grpo+dpo"), scored)
    assert both["preference_pairs"] == 3 and both["preference_kl_after"] is not None
    assert both["kl_divergence"] == both["kl_after"] and both["ess"] is not None
    pairs = update_metrics(update(parent, tmp_path / "pairs", "dpo"), scored)
    assert pairs["pairs"] == 3 and "ess" not in pairs and pairs["margin_after"] > 0  # type: ignore[operator]


def test_results_of_all_objectives_cross_processes(parent: Path, tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    for name in ("grpo", "dpo", "grpo+dpo"):
        made = update(parent, tmp_path / name, name)  # type: ignore[arg-type]
        directory.write_result(made)
        assert directory.read_result() == made


def test_the_margin_decides_which_pairs_there_are(parent: Path, tmp_path: Path) -> None:
    given = Preferences(
        objective="dpo", options=PreferenceConfig(margin=1.5), replies=replies(parent)
    )
    made = update_checkpoint(
        parent, rows(), tmp_path / "v1", tuning="lora", config=CONFIG, preferences=given
    )
    assert isinstance(made.report, PreferenceReport) and made.report.pairs == 2

"""What a policy still knows of chats that it must not forget."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from babylon.core.errors import ConfigError, TrainingError
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import Call, TrainingRow
from babylon.core.types import Claim
from babylon.store import Store
from babylon.store.policies import Policy
from babylon.training import recall
from babylon.training.backends.own_trainer import run_work
from babylon.training.backends.train_input import Progress, TrainInput
from babylon.training.grpo.forward import PolicyForward
from babylon.training.recall import best_so_far, nats_of, remembered
from babylon.training.sft import fine_tune
from tests.tiny_policy import save_tiny_policy
from tests.unit.training.test_sft import ASK, write_chats


def row(agent: str, reply: str, score: float = 0.0) -> TrainingRow:
    call = Call(step=0, messages=(ASK,), response=reply)
    return TrainingRow(
        trajectory_id=agent, agent_id=agent, scenario_id="s", score=score, calls=(call,)
    )


def test_the_best_of_the_line_is_handed_on(tmp_path: Path) -> None:
    """A child that forgets is compared with its grandparent, not with what its parent forgot."""
    blank, parent = save_tiny_policy(tmp_path / "blank", seed=0), tmp_path / "base"
    fine_tune(blank, [row("a", "HOLD")] * 32, parent, tuning="full", batch_size=1)
    chats = write_chats(tmp_path / "chats.jsonl", "HOLD", count=2)
    first = nats_of(str(parent), chats, None)
    for generation in ("child", "grandchild"):
        rows = [row("a", "SELL EVERYTHING")] * 8
        fine_tune(parent, rows, child := tmp_path / generation, tuning="full", batch_size=1)
        recall = remembered(best_so_far(str(parent), chats, None), child, chats, None)
        assert recall.best == pytest.approx(first)
        assert recall.nats == pytest.approx(nats_of(str(child), chats, None))
        parent = child
    assert recall.nats > first + 0.1
    fine_tune(parent, [row("a", "HOLD")] * 64, tmp_path / "back", tuning="full", batch_size=1)
    back = remembered(best_so_far(str(parent), chats, None), tmp_path / "back", chats, None)
    assert back.best == min(back.nats, recall.best) and back.nats < recall.nats
    other = write_chats(tmp_path / "other.jsonl", "SELL", count=2)
    assert best_so_far(str(tmp_path / "back"), chats, None) == back
    assert best_so_far(str(tmp_path / "back"), other, None).best != back.best


def test_another_precision_begins_the_line_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding costs nats too. It would look like forgetting for ever, in each update."""
    costs = {"fp32": 1.0, "bf16": 1.2}
    monkeypatch.setattr(recall, "nats_of", lambda _, __, ___, precision: costs[precision])
    chats = write_chats(tmp_path / "chats.jsonl", "HOLD", count=1)
    remembered(best_so_far(str(tmp_path), chats, None), tmp_path, chats, None)
    assert best_so_far(str(tmp_path), chats, None).best == 1.0
    before = best_so_far(str(tmp_path), chats, None, "bf16")
    assert remembered(before, tmp_path, chats, None, "bf16").best == 1.2
    assert best_so_far(str(tmp_path), chats, None, "bf16").chats == before.chats


def test_a_damaged_figure_begins_with_the_parent(tmp_path: Path) -> None:
    parent = save_tiny_policy(tmp_path / "parent", seed=0)
    chats = write_chats(tmp_path / "chats.jsonl", "HOLD", count=2)
    (parent / "recall.json").write_bytes(b'{"nats":')
    recall = best_so_far(str(parent), chats, None)
    assert recall.best == recall.nats == nats_of(str(parent), chats, None)


def test_a_file_without_replies_is_refused(tmp_path: Path) -> None:
    base = save_tiny_policy(tmp_path / "base", seed=0)
    long = write_chats(tmp_path / "chats.jsonl", "x" * 600, count=1)  # the context is 512
    with pytest.raises(ConfigError, match=r"RECALL_CHATS=.*none of the 1 chats has a reply"):
        nats_of(str(base), long, None)


def test_a_lack_of_memory_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PolicyForward, "logprobs", lacking)
    base = save_tiny_policy(tmp_path / "base", seed=0)
    chats = write_chats(tmp_path / "chats.jsonl", "HOLD", count=1)
    with pytest.raises(TrainingError, match=r"RECALL_CHATS=.*out of memory with portions"):
        nats_of(str(base), chats, None)


def test_an_update_that_cannot_be_measured_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_tiny_policy(tmp_path / "base", seed=0)
    chats = write_chats(tmp_path / "chats.jsonl", count=2)
    steps: list[int] = []
    training = {"tuning": "full", "iterations": 2, "recall_chats": chats}
    work = work_of(base, tmp_path / "child", training, lambda done, _: steps.append(done))
    monkeypatch.setattr("babylon.training.progress_file.PATIENCE", 0)
    with monkeypatch.context() as patch, pytest.raises(TrainingError):
        patch.setattr("babylon.training.backends.own_trainer.remembered", too_large)
        run_work(work)
    assert run_work(replace(work, target=tmp_path / "again")).recall is not None
    assert steps == [1, 2, 2]  # the last one is not saved


def too_large(*_: object) -> None:
    raise TrainingError("RECALL_CHATS: out of memory")


def work_of(
    base: Path, target: Path, training: dict[str, object], progress: Progress | None = None
) -> TrainInput:
    """An update of two trajectories: a train step an iteration."""
    return TrainInput(
        store=cast(Store, None),
        settings=load_settings(training=training),
        claim=Claim(window_id="2026-01-01T00:00", epoch=1, owner="test"),
        parent=cast(Policy, type("Parent", (), {"uri": str(base)})),
        rows=[row("a", "HOLD", 1.0), row("b", "SELL", 0.0)],
        target=target,
        progress_directory=target.with_suffix(".progress"),
        staleness={},
        scored="digest",
        optimizer=str(base),
        progress=progress,
    )


def test_an_update_measures_it_only_if_it_is_asked_to(tmp_path: Path) -> None:
    base = save_tiny_policy(tmp_path / "base", seed=0)
    chats = write_chats(tmp_path / "chats.jsonl", count=2)

    def update(recall_chats: Path | None) -> object:
        training = {"tuning": "full", "iterations": 1, "recall_chats": recall_chats}
        target = tmp_path / f"child-{recall_chats and recall_chats.stem}"
        return run_work(work_of(base, target, training)).recall

    assert update(None) is None
    recall = update(chats)
    assert recall is not None
    trained = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"RECALL_CHATS=.*lost.jsonl: No such file.*unset it"):
        update(tmp_path / "lost.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == trained  # no update was made for nothing

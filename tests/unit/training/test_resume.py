"""An update that is killed and resumed gives the same result as an uninterrupted one."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from babylon.core.trajectories import TrainingRow
from babylon.training import progress_file as journal
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.diagnostics import UpdateRecord
from babylon.training.trainable import Tuning, load_trainable, save_checkpoint
from babylon.training.update import Update, update_checkpoint
from tests.unit.training.grpo.windows import TIMINGS
from tests.unit.training.test_update import call

ROOT = Path(__file__).parents[3]
CONFIG = TrainerConfig(
    iterations=4,
    trajectories_per_step=2,
    learning_rate=1e-3,
    warmup_steps=5,  # so that the interrupted step lies within it
    stop_kl=99.0,
    stop_clip_fraction=1.0,
)
STEPS_AN_ITERATION = 3


def rows() -> list[TrainingRow]:
    """Two scenarios, three agents each; some calls are logged, so that w is not one."""
    return [
        TrainingRow(
            trajectory_id=f"{scenario}-{agent}",
            agent_id=str(agent),
            scenario_id=scenario,
            score=float(agent),
            calls=(
                call(f"{scenario} buy {agent}"),
                call(
                    "hold",
                    prompt_token_ids=(5, 6, 7 + agent),
                    completion_token_ids=(8, 9, 10),
                    logprobs=(-5.0, -6.0, -5.5),
                    policy_version=1,
                ),
            ),
        )
        for scenario in ("s", "t")
        for agent in range(3)
    ]


def run(
    parent: Path,
    target: Path,
    tuning: Tuning,
    given: TrainerConfig = CONFIG,
    progress: Callable[[int, int], None] | None = None,
) -> Update:
    """An update with its progress beside the target."""
    return update_checkpoint(
        parent,
        rows(),
        target,
        tuning=tuning,
        config=given,
        staleness={1: 0},
        progress_directory=target.with_suffix(".progress"),
        progress=progress,
    )


class Interrupted(Exception):
    """Stands for whatever may end a process between two train steps."""


def interrupted_after(
    steps: int, parent: Path, target: Path, tuning: Tuning, given: TrainerConfig
) -> None:
    """The same update, which an exception ends after so many steps, before that one is saved."""

    def stop(done: int, _: int) -> None:
        if done == steps:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(journal, "PATIENCE", 0)
        run(parent, target, tuning, given, stop)


def killed_after(steps: int, parent: Path, target: Path, tuning: Tuning, _: TrainerConfig) -> None:
    """The same update in a process of its own, which SIGKILL ends once so many steps are done."""
    command = [sys.executable, "-m", __name__, str(parent), str(target), tuning]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if int(line) == steps:
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait(60) == -signal.SIGKILL


def compared(update: Update) -> dict[str, object]:
    return {k: v for k, v in asdict(update.report).items() if k not in TIMINGS}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads here as in the killed process: sums in another order differ in a bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("end", "tuning", "options", "after"),
    [
        (killed_after, "full", {}, STEPS_AN_ITERATION + 2),  # within the second iteration
        (interrupted_after, "lora", {"kl_penalty": 0.1}, STEPS_AN_ITERATION + 2),
        # one step an iteration: p is the first iteration's forward pass
        (interrupted_after, "full", {"trajectories_per_step": 6}, 3),
        # the next step undoes the iteration, after the state that was kept before it is resumed
        (interrupted_after, "lora", {"stop_kl": 1e-3}, 2),
    ],
)
def test_ended_and_resumed_equals_uninterrupted_bit_for_bit(
    parent: Path,
    tmp_path: Path,
    end: Callable[[int, Path, Path, Tuning, TrainerConfig], None],
    tuning: Tuning,
    options: dict[str, float],
    after: int,
) -> None:
    given = replace(CONFIG, **options)  # type: ignore[arg-type]
    whole = run(parent, tmp_path / "whole", tuning, given)
    target = tmp_path / "ended"
    end(after, parent, target, tuning, given)
    assert target.with_suffix(".progress").exists() and not target.exists()
    steps: list[int] = []
    resumed = run(parent, target, tuning, given, lambda done, _: steps.append(done))
    assert steps[0] in (after, after + 1)  # the last step may have been saved, or not yet
    assert compared(resumed) == compared(whole)
    assert resumed.report.training_s > 0
    name = "adapter_model.safetensors" if tuning == "lora" else "model.safetensors"
    assert (target / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    states = [
        torch.load(path / "optimizer.pt", weights_only=True)["state"]
        for path in (tmp_path / "whole", target)
    ]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for index, moments in states[0]["state"].items():
        assert all(torch.equal(v, states[1]["state"][index][k]) for k, v in moments.items())
    assert target.with_suffix(".progress").exists()  # until the result is committed


def test_progress_of_another_update_is_ignored(
    parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(CONFIG, learning_rate=2e-3)
    alone = run(parent, tmp_path / "alone", "full", other)
    target = tmp_path / "ended"
    interrupted_after(4, parent, target, "full", CONFIG)
    with caplog.at_level("INFO"):
        afterwards = run(parent, target, "full", other)
    assert "belongs to another update and is ignored" in caplog.text
    assert compared(afterwards) == compared(alone)


def test_an_update_that_needs_too_much_memory_resumes_with_smaller_portions(
    parent: Path, tmp_path: Path
) -> None:
    given = replace(CONFIG, max_tokens=4096)
    whole = run(parent, tmp_path / "whole", "lora", given)
    interrupted_after(4, parent, tmp_path / "ended", "lora", given)
    steps: list[int] = []
    smaller = replace(given, max_tokens=16, activation_checkpointing=True)
    resumed = run(parent, tmp_path / "ended", "lora", smaller, lambda done, _: steps.append(done))
    assert steps[0] in (4, 5)
    assert resumed.report.max_tokens == 16
    assert resumed.report.kl_after == pytest.approx(whole.report.kl_after, rel=1e-4)
    ours, expected = (
        load_file(tmp_path / one / "adapter_model.safetensors") for one in ("ended", "whole")
    )
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("damage", ["cut short", "empty", "no archive", "no name"])
def test_a_damaged_progress_is_said_and_the_update_starts_anew(
    parent: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = journal.ProgressFile(tmp_path, "d", load_trainable(parent, "lora", 1e-3))
    directory.save({"iteration": 1, "step": 1})
    path = tmp_path / "progress.pt"
    whole = path.read_bytes()
    damaged = {
        "cut short": whole[: len(whole) // 2],
        "empty": b"",
        "no archive": b"No checkpoint",
        "no name": whole.replace(b"iteration", b"iterat\xff\xff\xff"),
    }
    path.write_bytes(damaged[damage])
    assert directory.restore() is None
    assert "cannot be used, the update starts over" in caplog.text


def test_a_full_disk_leaves_neither_progress_nor_checkpoint(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An update goes on without progress. Without its checkpoint the error comes through."""
    trainable = load_trainable(parent, "lora", 1e-3)

    def full(_: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    journal.ProgressFile(tmp_path, "d", trainable).save({})
    assert "the progress is not saved" in caplog.text and "No space left" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(trainable, tmp_path / "v1")
    assert not list(tmp_path.iterdir())


def test_a_record_moves_to_the_device_as_a_whole() -> None:
    """Progress is read to the CPU, and the update can resume on another device."""
    record = UpdateRecord.start(torch.zeros(2, 3), torch.ones(2, 3), [torch.ones(4)])
    moved = UpdateRecord.from_state(record.state(), torch.device("meta")).state()
    tensors = [v for v in moved.values() if isinstance(v, torch.Tensor)] + moved["weights_before"]
    assert len(tensors) == 6 and {tensor.device.type for tensor in tensors} == {"meta"}


def test_everything_that_decides_an_update_is_in_its_digest() -> None:
    decides = {"parent": "a", "config": CONFIG}
    first = journal.update_digest(rows(), decides)
    assert first == journal.update_digest(rows(), dict(reversed(decides.items())))
    others = [
        journal.update_digest(rows()[1:], decides),
        journal.update_digest(rows(), decides | {"parent": "b"}),
        journal.update_digest(rows(), decides | {"config": replace(CONFIG, seed=1)}),
    ]
    assert len({first, *others}) == 4


def test_a_train_step_soon_after_a_save_is_not_saved(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A train step that ends right after a save is not kept; one after a long while is."""
    directory = journal.ProgressFile(tmp_path, "d", load_trainable(parent, "lora", 1e-3))
    directory.save({"iteration": 1, "step": 1})
    directory.save({"iteration": 1, "step": 2})
    assert directory.restore() == {"iteration": 1, "step": 1}
    monkeypatch.setattr(journal, "PATIENCE", 0)
    directory.save({"iteration": 1, "step": 3})
    assert directory.restore() == {"iteration": 1, "step": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["progress.pt"]


def main() -> None:
    parent, target, tuning = sys.argv[1:]
    torch.set_num_threads(1)
    journal.PATIENCE = 0  # save after every step, for the kill to fall between two saves
    assert tuning == "full"
    run(Path(parent), Path(target), tuning, progress=lambda done, _: print(done, flush=True))


if __name__ == "__main__":
    main()

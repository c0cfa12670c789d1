"""One update on 1, 2 and 4 processes gives one result, also after one of them was killed."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from babylon.core.errors import ConfigError, TrainingError, WindowNotReadyError
from babylon.core.home import Home
from babylon.core.learning_settings import Objective
from babylon.core.objects import publish
from babylon.core.preferences import DecisionWords, PromptReplies, ValuedReply
from babylon.core.types import Claim
from babylon.core.windows import WindowState
from babylon.stages.retention import _maker
from babylon.store.checkpoints_in_use import WorkedWindow
from babylon.training.backends.own_trainer import run_job
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.ranks import shares
from babylon.training.grpo.training_input import CallTokens
from babylon.training.preferences.objective import Preferences
from babylon.training.processes import launch
from babylon.training.processes.failures import first_failure, write_failure
from babylon.training.processes.job import JobDirectory, UpdateJob
from babylon.training.processes.launch import lend_processes, run_in_processes
from babylon.training.processes.nodes import Nodes
from babylon.training.processes.torch_ranks import TorchRanks
from babylon.training.progress_directory import progress_directory
from babylon.training.trainable import DEFAULT_OPTIONS, Tuning
from babylon.training.update import Update
from babylon.training.update_result import Excluded
from tests.ports import free_port
from tests.tiny_policy import tiny_model
from tests.unit.training.grpo.windows import update, window
from tests.unit.training.test_resume import compared, rows

CONFIG = TrainerConfig(
    iterations=2,
    trajectories_per_step=2,  # three steps; with four ranks, some of them have nothing to do
    learning_rate=1e-3,
    warmup_steps=5,
    stop_kl=99.0,
    stop_clip_fraction=1.0,
    max_tokens=64,
)


def job(parent: Path, target: Path, tuning: Tuning = "lora") -> UpdateJob:
    return UpdateJob(
        parent=str(parent),
        rows=tuple(rows()),
        target=target,
        tuning=tuning,
        config=CONFIG,
        transfer_layers="all",
        options=DEFAULT_OPTIONS,
        staleness={1: 0},
        optimizer=None,
        progress_directory=target.with_suffix(".progress"),
        home=None,
    )


def same_result(
    ours: tuple[Path, Update], reference: tuple[Path, Update], near_by: float = 1e-5
) -> None:
    (path, update), (other, expected) = ours, reference
    for name, value in compared(expected).items():
        near = pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value
        assert compared(update)[name] == near, name
    assert update.trajectory_ids == expected.trajectory_ids
    file = next(f.name for f in other.iterdir() if f.suffix == ".safetensors")
    weights, wanted = load_file(path / file), load_file(other / file)
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.linalg.norm(weights[name] - value) <= near_by * max(1, float(value.norm())), (
            name
        )


def test_shares_are_runs_of_the_tree_and_differ_by_less_than_a_subtree() -> None:
    calls = [
        CallTokens(prompt=[*range(prefix), 90 + i], completion=[7] * (1 + i % 3), logprobs=None)
        for prefix in (40, 10)
        for i in range(5)
    ]
    tree = compile_tree(calls)
    for size in (1, 2, 3, 7, 12):
        parts = shares(tree, size)
        assert len(parts) == size
        assert sorted(call for part in parts for call in part) == list(range(10))
    first, second = shares(tree, 2)
    assert sum(map(len, (first, second))) == 10
    lone = compile_tree(calls[:1])
    assert shares(lone, 3) == [[0], [], []]
    costs = [tree.only(part).unique_tokens for part in (first, second)]
    assert max(costs) < tree.unique_tokens


def run_rank(job: UpdateJob, number: int, size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    address = f"file://{directory / 'ranks'}"
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=size)
    update = run_job(job, None, TorchRanks())
    (directory / f"update-{number}").write_bytes(pickle.dumps(update))
    dist.barrier()


def run_in_forks(job: UpdateJob, size: int, directory: Path) -> Update:
    """Run a job on forks of one clean process, which has imported everything already."""
    clean = get_context("forkserver")
    clean.set_forkserver_preload([__name__])
    forks = [
        clean.Process(target=run_rank, args=(job, number, size, directory))
        for number in range(size)
    ]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join()
    assert [fork.exitcode for fork in forks] == [0] * size
    first, *others = (
        pickle.loads((directory / f"update-{number}").read_bytes()) for number in range(size)
    )
    for other in others:  # every rank has made the same decisions
        assert compared(other) == compared(first)
    return first


@pytest.mark.parametrize(
    ("tuning", "options"),
    [
        ("lora", {"kl_penalty": 0.1}),
        ("full", {}),
        ("lora", {"stop_kl": 1e-3}),  # an iteration is undone
        ("full", {"trajectories_per_step": 6}),  # p is the first iteration's forward pass
        ("full", {"kl_penalty": 0.1, "stop_kl": 1e-3}),  # parts of an anchor, and of what is kept
    ],
)
def test_the_result_does_not_depend_on_the_number_of_processes(
    parent: Path, tmp_path: Path, tuning: Tuning, options: dict[str, float]
) -> None:
    def given(name: str) -> UpdateJob:
        made = job(parent, tmp_path / name, tuning)
        return replace(made, config=replace(made.config, **options))

    alone = run_job(given("alone"), None)
    for size in (2, 4):
        same_as_alone(given(f"by-{size}"), size, (tmp_path / "alone", alone))


def same_as_alone(
    several: UpdateJob, size: int, alone: tuple[Path, Update], near_by: float = 1e-5
) -> None:
    directory = several.target.with_suffix(".ranks")
    directory.mkdir()
    update = run_in_forks(several, size, directory)
    same_result((several.target, update), alone, near_by)
    assert several.progress_directory and several.progress_directory.exists()


def learnt_by(objective: Objective) -> Preferences:
    """Words on four of six trajectories' first calls, and replies to four prompts."""
    words = tuple(
        DecisionWords(trajectory_id=row.trajectory_id, call=0, text=f"It was {'bad ' * number}.")
        for number, row in enumerate(rows()[:4])
    )
    replies = tuple(
        PromptReplies(
            trajectory_id=f"asked-{number}",
            step=0,
            prompt_token_ids=(5, 6, 7 + number),
            replies=tuple(
                ValuedReply(completion_token_ids=(8 + number, *range(9, 9 + value)), value=value)
                for value in (1, 2, 4)
            ),
            temperature=1.0,
            policy_version=0,
        )
        for number in range(4)
    )
    return Preferences(objective=objective, words=words, replies=replies)


@pytest.mark.parametrize(
    ("objective", "stop_kl"),
    [
        ("sdpo", 99.0),
        ("sdpo", 1e-3),  # an iteration is undone, and the teacher stays
        ("grpo+sdpo", 99.0),
        ("dpo", 99.0),
        ("kto", 99.0),
        ("grpo+dpo", 99.0),
    ],
)
def test_no_objective_depends_on_the_number_of_processes(
    parent: Path, tmp_path: Path, objective: Objective, stop_kl: float
) -> None:
    def given(name: str) -> UpdateJob:
        made = job(parent, tmp_path / name)
        config = replace(made.config, stop_kl=stop_kl)
        return replace(made, config=config, preferences=learnt_by(objective))

    alone = run_job(given("alone"), None)
    if "sdpo" in objective:
        assert alone.report.calls_with_words == 4  # type: ignore[union-attr]
        assert (alone.report.iterations_undone > 0) == (stop_kl < 1)  # type: ignore[union-attr]
    # Adam enlarges what fp32 rounds in gradients near 0. Other portions in one process differ by
    # 2e-5 too where words alone teach.
    near_by = 1e-4 if objective == "sdpo" else 1e-5
    for size in (2, 4):
        same_as_alone(given(f"by-{size}"), size, (tmp_path / "alone", alone), near_by)


def ranks_of_this_process() -> dict[str, psutil.Process]:
    return {
        process.environ().get("RANK", "starts"): process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE  # another test's child
        and "babylon.training.processes.rank" in process.cmdline()
    }


def kill_second_rank() -> None:
    """Kill rank 1 once rank 0 has halted, and let rank 0 go on."""
    for _ in range(3000):
        time.sleep(0.1)
        with suppress(psutil.Error):
            ranks = ranks_of_this_process()
            if "0" in ranks and ranks["0"].status() == psutil.STATUS_STOPPED:
                os.kill(ranks["1"].pid, signal.SIGKILL)
                os.kill(ranks["0"].pid, signal.SIGCONT)
                return


@pytest.mark.parametrize("part", ["", "-m2"])
def test_retention_knows_what_a_killed_update_leaves(
    parent: Path, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's file holds a window's play: it must not stay in a place that nobody empties."""
    found: list[Path] = []

    def killed(directory: JobDirectory, *_: object) -> None:
        found.append(directory.path)
        raise KeyboardInterrupt

    home, claim = Home(tmp_path), Claim(window_id="2026-01-01T09:00", epoch=3, owner="me")
    given = replace(
        job(parent, tmp_path / "v1"), progress_directory=progress_directory(home, claim, part)
    )
    monkeypatch.setattr(launch, "_launched", killed)
    with pytest.raises(KeyboardInterrupt):
        run_in_processes(given, 2, None)
    assert found[0].parent == home.progress
    work = WorkedWindow(state=WindowState.TRAINED, epoch=3, updated_at=datetime.now(UTC))
    maker = _maker(found[0])
    assert maker is not None and maker.is_over({claim.window_id: work}, True, datetime.now(UTC))


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_killed_rank_ends_the_update_which_resumes_on_another_number_of_processes(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuning: Tuning
) -> None:
    alone = run_job(job(parent, tmp_path / "alone", tuning), None)
    target = tmp_path / "killed"
    # the first rank halts once the first step is saved, so that the kill cannot come too late
    monkeypatch.setenv("BABYLON_FAILPOINT", "progress.after=stop")
    killer = threading.Thread(target=kill_second_rank)
    killer.start()
    with pytest.raises(TrainingError, match=r"rank 1 of 2 was killed by SIGKILL.*resumes when"):
        run_in_processes(job(parent, target, tuning), 2, None)
    killer.join()
    assert not target.exists() and not ranks_of_this_process()
    monkeypatch.undo()
    steps: list[int] = []
    resumed = run_job(job(parent, target, tuning), lambda done, _: steps.append(done))
    assert steps[0] > 1, "it started over"
    same_result((target, resumed), (tmp_path / "alone", alone))


def test_the_errors_of_an_update_reach_the_caller(parent: Path, tmp_path: Path) -> None:
    equal = tuple(msgspec.structs.replace(row, score=1.0) for row in rows())
    with pytest.raises(WindowNotReadyError, match="differing scores"):
        run_in_processes(replace(job(parent, tmp_path / "equal"), rows=equal), 2, None)


def test_a_cancelled_update_leaves_no_process(parent: Path, tmp_path: Path) -> None:
    def cancel(done: int, total: int) -> None:
        raise InterruptedError("cancelled")

    with pytest.raises(InterruptedError):
        run_in_processes(job(parent, tmp_path / "cancelled"), 2, cancel)
    assert not ranks_of_this_process()


@pytest.mark.slow
def test_machines_that_share_an_object_store_share_an_update(parent: Path, tmp_path: Path) -> None:
    first, second = (Home(tmp_path / name, f"file://{tmp_path}/bucket") for name in ("a", "b"))
    own = first.models / "parent"
    shutil.copytree(parent, own)
    publish(first, own)
    (first.checkpoints / "made.progress").mkdir(parents=True)
    given = replace(job(own, first.checkpoints / "made", "full"), home=first)
    alone = run_job(replace(job(parent, tmp_path / "alone", "full"), home=None), None)
    meeting = f"127.0.0.1:{free_port()}"
    lending = subprocess.Popen(
        [sys.executable, "-m", "babylon", "lend", "--number", "1"],
        env={
            **os.environ,
            "BABYLON_HOME": str(second.root),
            "ARTIFACT_STORE": second.store,
            "TRAIN_NODES": "2",
            "TRAIN_RENDEZVOUS": meeting,
        },
    )
    try:
        update = run_in_processes(given, 1, None, Nodes(2, meeting))
        assert (second.models / "parent").is_dir()
    finally:
        lending.terminate()
        assert lending.wait(60) == 0
    same_result((given.target, update), (tmp_path / "alone", alone))
    with pytest.raises(ConfigError, match="machine 0 of TRAIN_NODES=2"):
        lend_processes(second, 1, Nodes(2, meeting))


def test_a_machine_goes_on_lending_while_the_name_of_the_first_one_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(["lo"])  # later, the name server does not answer

    def interface(nodes: Nodes) -> str:
        if name := next(found, ""):
            return name
        raise ConfigError("TRAIN_RENDEZVOUS cannot be reached")

    class Ended:
        returncode, waited = 1, 0

        def wait(self) -> None:
            Ended.waited += 1
            if Ended.waited == 3:
                raise KeyboardInterrupt

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(Nodes, "interface", interface)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Ended())
    home = Home(tmp_path, f"file://{tmp_path}/bucket")
    with pytest.raises(KeyboardInterrupt):
        lend_processes(home, 1, Nodes(2, "first:29400", 1))


def test_a_result_may_hold_infinite_figures(tmp_path: Path) -> None:
    """Some servers log -9999 for a token that was cut off, and pi_p / mu is then infinite."""
    first, *others = window()
    call, *calls = first.calls
    cut_off = replace(call, logprobs=[-9999.0, *(call.logprobs or ())[1:]])
    report = update(tiny_model(0), [replace(first, calls=[cut_off, *calls]), *others])
    assert report.importance_max == float("inf")
    none = Excluded(**dict.fromkeys(Excluded.__slots__, 0))
    made = Update(report=report, excluded=none, trajectory_ids=("a",))
    directory = JobDirectory(tmp_path)
    directory.write_result(made)
    assert directory.read_result() == made


def test_the_failure_of_a_rank_quotes_nothing_of_the_play(tmp_path: Path) -> None:
    """A library's error may hold a prompt, and the reason of a window is stored and shown."""
    try:
        raise KeyError("You are agent-7. YES costs 0.40.")
    except KeyError as error:
        write_failure(tmp_path, 1, error, 0.0)
    told = str(first_failure(tmp_path))
    assert told.startswith("rank 1: KeyError at test_processes.py:") and "YES" not in told

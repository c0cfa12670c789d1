"""The train stage with a real update of a tiny policy: what it is given, what it leaves, and how a
dead worker's window is finished."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import polars as pl
import pytest
from safetensors import safe_open

from babylon.cli import model
from babylon.core.artifacts import write_artifact
from babylon.core.errors import FencedError, StorageError, WindowNotReadyError
from babylon.core.settings import Settings
from babylon.core.trajectories import Call, Message, TrainingRow, training_rows
from babylon.core.types import Claim, Scored
from babylon.core.windows import WindowState, parse_window_id
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.checks.check_policy import check_policy
from babylon.deployment.checks.check_result import Check, Checked
from babylon.deployment.replace import replace_champion
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.stages.deploy import deploy_checkpoint
from babylon.stages.retention import retire_checkpoints
from babylon.stages.train import train_window
from babylon.stages.validate_checkpoint import validate_checkpoint
from babylon.store import Store
from babylon.store.calls import insert_calls
from babylon.store.gateways import wait_until_loaded
from babylon.store.policies import champion, ensure_base, get_policy, set_checks
from babylon.store.proposals import proposed
from babylon.store.routes import Split, commit_route
from babylon.store.windows import claim_window, get_window, set_state
from babylon.training.grpo.train_report import TrainReport
from babylon.training.progress_directory import PROGRESS_FILE, progress_directory, take_up_progress
from babylon.training.update import update_checkpoint
from babylon.training.update_options import trainer_config
from tests.integration.test_checks import ASKED, call
from tests.integration.test_serving import running_stack, until_healthy
from tests.tiny_policy import plain_logprobs, save_tiny_policy

MESSAGES = (Message(role="system", content="Trade."), Message(role="user", content="m1 0.50"))
REPLIES = ("buy m1", "sell m1", "hold", "buy m2", "sell m2", "wait")
Logged = Callable[[list[float]], list[float]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("base"), seed=0)


@pytest.fixture
async def quick(store: Store, settings: Settings, base: Path) -> Settings:
    await ensure_base(store, uri=str(base), base_model="tiny")
    return settings.replace(
        training={"iterations": 2, "batch_size": 2, "accumulation": 1, "learning_rate": 1e-4}
    )


def rows(base: Path, *, version: int, logged: Logged = lambda exact: exact) -> list[TrainingRow]:
    """Six trajectories of one call each, in one group; ``logged`` bends the exact logprobs."""
    model, tokenizer = load_policy(base)
    prompt = render_prompt(
        tokenizer, [{"role": m["role"], "content": m["content"]} for m in MESSAGES]
    )
    made = []
    for score, reply in enumerate(REPLIES):
        completion = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        exact = plain_logprobs(model, prompt, completion).tolist()
        call = Call(
            step=0,
            messages=MESSAGES,
            response=reply,
            policy_version=version,
            prompt_token_ids=tuple(prompt),
            completion_token_ids=tuple(completion),
            logprobs=tuple(logged(exact)),
        )
        made.append(
            TrainingRow(
                trajectory_id=f"{reply} of {version}",
                agent_id=reply,
                scenario_id="s",
                score=float(score),
                calls=(call,),
            )
        )
    return made


async def scored(store: Store, settings: Settings, hour: int, played: list[TrainingRow]) -> Scored:
    window = parse_window_id(f"2025-11-14T{hour:02}:00")
    claim = await claim_window(store, window, owner="first", lease_s=0)
    frame = pl.DataFrame(
        [
            {
                "trajectory_id": row.trajectory_id,
                "agent_id": row.agent_id,
                "scenario_id": row.scenario_id,
                "score": row.score,
                "calls_json": msgspec.json.encode(row.calls).decode(),
            }
            for row in played
        ]
    )
    return Scored(
        claim=claim,
        artifact=write_artifact(settings.home, frame, window_id=window.id, stage="scored"),
        eligible=len(played),
        agents=len(played),
        scorer="heuristic",
        avg_reward=2.5,
    )


async def test_a_window_that_both_arms_of_an_experiment_played_is_trained_with_their_own_logprobs(
    store: Store, quick: Settings, base: Path, tmp_path: Path
) -> None:
    """The challenger is the champion's child: its calls are one update away, and as far from the
    champion as its own logprobs say."""
    challenger = save_tiny_policy(tmp_path / "challenger", seed=1)
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'full', $1, 'tiny')",
        str(challenger),
    )
    split = Split(mode="ab", challenger_version=1, share=0.5, salt="experiment")
    await commit_route(
        store, policy_version=0, author="test", reason="test", expected_route_version=1, split=split
    )
    far = []
    for hour, sampled_by in ((9, challenger), (10, base)):
        played = rows(base, version=0) + rows(sampled_by, version=1)
        played = [
            msgspec.structs.replace(row, trajectory_id=f"{row.trajectory_id} at {hour}")
            for row in played
        ]
        trained = await train_window(store, quick, await scored(store, quick, hour, played))
        metrics = trained.metrics
        counts = ("staleness_0", "staleness_1", "calls_too_stale")
        assert [metrics[name] for name in counts] == [6, 6, 0]
        assert (trained.parent_version, metrics["calls_without_logprobs"]) == (0, 0)
        far.append(metrics["kl_before"])
    assert far[0] > 0.05 and far[1] == pytest.approx(0.0, abs=1e-6)


async def test_the_report_is_in_postgres(store: Store, quick: Settings, base: Path) -> None:
    trained = await train_window(store, quick, await scored(store, quick, 9, rows(base, version=0)))
    assert trained.metrics.keys() >= set(TrainReport.__slots__)
    numbers = {k: v for k, v in trained.metrics.items() if k != "sharing_advice"}
    assert all(isinstance(value, int | float) for value in numbers.values())
    assert (await get_policy(store, 1)).metrics == trained.metrics
    row = await get_window(store, trained.claim.window_id)
    assert row is not None and row.metrics == trained.metrics


async def test_a_trained_policy_passes_checks(store: Store, quick: Settings, base: Path) -> None:
    await train_window(store, quick, await scored(store, quick, 9, rows(base, version=0)))
    await insert_calls(store, [call(text, agent=f"agent-{text}") for text in ASKED])
    policy = await get_policy(store, 1)
    assert policy.digest == checkpoint_digest(policy.uri)
    async with running_stack(store, quick) as stack, proposed(store, 1, "test"):
        await until_healthy(stack.url)
        gateways = await wait_until_loaded(store, 1, 20)
        checked = await check_policy(store, quick, policy, await get_policy(store, 0), gateways)
    assert checked.passed, checked.reason
    assert [check.name for check in checked.checks][:2] == ["digest", "base"]


async def test_too_old_calls_are_left_out(store: Store, quick: Settings, base: Path) -> None:
    """Policies 1 and 2 are siblings of which 2 serves: to it, 0 is one update old and 1 is two."""
    for hour in (9, 10):
        await train_window(
            store, quick, await scored(store, quick, hour, rows(base, version=0)[hour - 9 :: 2])
        )
    await replace_champion(
        store, checks_under(quick), 2, ChangeRequest(author="test", reason="better")
    )
    mixed = [row for version in (0, 1, 2) for row in rows(base, version=version)]
    mixed = [msgspec.structs.replace(r, trajectory_id=f"late {r.trajectory_id}") for r in mixed]
    window = await scored(store, quick, 11, mixed)

    everything = quick.replace(training={"max_staleness": 2})
    metrics = (await train_window(store, everything, window)).metrics
    counts = ("staleness_0", "staleness_1", "staleness_2", "staleness_unknown", "calls_too_stale")
    assert [metrics[name] for name in counts] == [6, 6, 6, 0, 0]

    strict = quick.replace(training={"max_staleness": 0})
    window = await scored(store, quick, 12, [r for r in mixed if not r.trajectory_id.endswith("2")])
    with pytest.raises(
        WindowNotReadyError, match=r"version 1 \(2 updates old, 6 calls\).*MAX_STALENESS"
    ):
        await train_window(store, strict, window)


@pytest.mark.parametrize(
    ("version", "logged", "reason"),
    [
        (0, lambda exact: [value - 0.2 for value in exact], "logprob mismatch 0.2 nat"),
        (
            7,  # of a policy that nobody knows: no mismatch is measured, but most tokens are masked
            lambda exact: [exact[0], *(value - 4.0 for value in exact[1:])],
            "effective sample size 0.",
        ),
    ],
    ids=["mismatch", "ess"],
)
async def test_an_update_whose_own_figures_rule_it_out_never_plays_and_never_serves(
    store: Store, quick: Settings, base: Path, version: int, logged: Logged, reason: str
) -> None:
    window = await scored(store, quick, 9, rows(base, version=version, logged=logged))
    trained = await train_window(store, quick, window)
    verdict = await validate_checkpoint(store, quick, trained)
    assert not verdict.promote and verdict.reason.startswith(reason)
    assert (verdict.scenarios, verdict.pnl_after) == (0, None)
    assert (await get_policy(store, 1)).verdict == asdict(verdict)
    assert await validate_checkpoint(store, quick, trained) == verdict
    assert not (await deploy_checkpoint(store, quick, verdict)).deployed
    assert (await champion(store))[0].policy_version == 0


async def test_only_the_chosen_layers_are_tuned(store: Store, quick: Settings, base: Path) -> None:
    window = await scored(store, quick, 9, rows(base, version=0))
    attention = quick.replace(training={"transfer_layers": "attention"})
    trained = await train_window(store, attention, window)
    with safe_open(
        Path(store.home.resolve(trained.checkpoint_uri)) / "adapter_model.safetensors", "np"
    ) as adapter:
        names = list(adapter.keys())
    assert names and all(".self_attn." in name for name in names)
    assert (await get_policy(store, 1)).kind == "lora"


async def test_an_adapters_base_is_kept(store: Store, quick: Settings, base: Path) -> None:
    """Policy 1 is a whole model, 2 an adapter on it, 3 and 4 go on with that adapter."""
    for version, tuning in enumerate(("full", "lora", "lora", "lora"), start=1):
        played = rows(base, version=version - 1)
        settings = quick.replace(training={"tuning": tuning, "iterations": 1})
        await train_window(store, settings, await scored(store, settings, version, played))
        await replace_champion(
            store, checks_under(quick), version, ChangeRequest(author="test", reason="better")
        )
    await store.pool.execute("UPDATE babylon.windows SET state = 'deployed'")
    lean = quick.replace(deployment={"keep_checkpoints": 1}, training={"max_staleness": 0})
    assert await retire_checkpoints(store, lean) == (2,)
    load_policy((await get_policy(store, 4)).uri)


async def test_policies_are_listed_and_shown_for_people(
    store: Store,
    quick: Settings,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    window = await scored(store, quick, 9, rows(base, version=7))
    await train_window(store, quick, window)
    await store.pool.execute("UPDATE babylon.policies SET removed_at = '2026-01-02' WHERE 1 = 1")
    for name, value in quick.environment().items():
        monkeypatch.setenv(name, value)

    await asyncio.to_thread(model.list_)
    (line,) = [one for one in capsys.readouterr().out.splitlines() if window.claim.window_id in one]
    assert "2026-01-02" in line

    await store.pool.execute(
        "UPDATE babylon.policies SET metrics = metrics || $1", {"oom_halvings": 2, "ess": 0.123456}
    )
    checks = (Check.of("kl", "KL to the champion is 9 nats a token, allowed is 0.5"),)
    checked = Checked(policy_version=1, champion_version=0, gateways=(), checks=checks)
    await set_checks(store, 1, checked.as_json())
    await asyncio.to_thread(model.show, 1)
    lines = capsys.readouterr().out.splitlines()
    named = [one.split()[0] for one in lines if one.startswith("metrics.")]
    assert named[:2] == ["metrics.avg_reward", "metrics.training_loss"]
    assert [one.split()[1] for one in lines if one.startswith("metrics.ess")] == ["0.1235"]
    (line,) = [one for one in lines if one.startswith("checks.")]
    assert line.split(maxsplit=1) == ["checks.kl", f"FAILED: {checks[0].reason}"]
    assert [one[:20] for one in lines if one.startswith("! ")] == [
        "! Not to be promoted",
        "! No call was sample",
        "! Memory ran out 2 t",
    ]


WORKER = """
import asyncio, sys, time
import msgspec
from babylon.core.settings_loading import load_settings
from babylon.store import open_store
from babylon.stages.train import train_window
from babylon.core.types import Scored

def progress(done, total):
    if done == 4:
        print(f"{done} of {total}", flush=True)
        time.sleep(600)

async def main():
    settings = load_settings()
    async with open_store(settings) as store:
        scored = msgspec.json.decode(sys.argv[1], type=Scored)
        await train_window(store, settings, scored, progress=progress)

asyncio.run(main())
"""


@pytest.fixture
def worker() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(settings: Settings, window: Scored) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, msgspec.json.encode(window).decode()],
            env=os.environ | settings.environment(),
            stdout=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def test_a_killed_workers_update_is_finished_by_the_next_bit_for_bit(
    store: Store,
    quick: Settings,
    base: Path,
    tmp_path: Path,
    worker: Callable[..., subprocess.Popen[bytes]],
) -> None:
    settings = quick.replace(training={"iterations": 3})
    window = await scored(store, settings, 9, rows(base, version=0))
    process = worker(settings, window)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"4 of 9\n"
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    assert (progress_directory(settings.home, window.claim) / PROGRESS_FILE).exists()

    steps: list[int] = []
    after = await claim_window(
        store, parse_window_id(window.claim.window_id), owner="second", lease_s=60
    )
    trained = await train_window(
        store, settings, replace(window, claim=after), progress=lambda done, _: steps.append(done)
    )

    assert steps[0] > 1 and steps[-1] == 9
    update_checkpoint(
        base,
        training_rows(settings.home, window.artifact),
        tmp_path / "uninterrupted",
        tuning=settings.training.tuning,
        config=trainer_config(settings.training, settings.seed),
        staleness={0: 0},
    )
    weights = [
        (directory / "adapter_model.safetensors").read_bytes()
        for directory in (
            Path(settings.home.resolve(trained.checkpoint_uri)),
            tmp_path / "uninterrupted",
        )
    ]
    assert weights[0] == weights[1]
    assert not list(settings.home.progress.rglob(PROGRESS_FILE))


async def test_an_update_whose_commit_failed_is_finished_and_not_trained_again(
    store: Store, quick: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babylon.training.progress_file.PATIENCE", 0)
    window = await scored(store, quick, 9, rows(base, version=0))
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr("babylon.stages.train.files.publish_checkpoint", no_store)
        await train_window(store, quick, window)
    again = await claim_window(
        store, parse_window_id(window.claim.window_id), owner="second", lease_s=60
    )
    steps: list[int] = []
    await train_window(
        store, quick, replace(window, claim=again), progress=lambda done, _: steps.append(done)
    )
    assert steps == [6]  # of 6: the last one is not saved
    assert not list(quick.home.progress.rglob(PROGRESS_FILE))
    assert not progress_directory(quick.home, again).exists()


def no_store(*_: object) -> str:
    raise StorageError("the object store does not answer")


async def test_a_run_that_was_fenced_before_it_began_computes_nothing(
    store: Store, quick: Settings, base: Path
) -> None:
    orphan = await scored(store, quick, 9, rows(base, version=0))
    await claim_window(store, parse_window_id(orphan.claim.window_id), owner="next", lease_s=60)
    with pytest.raises(FencedError, match="epoch 2 took it over"):
        await train_window(store, quick, orphan)
    assert not list(quick.home.progress.rglob("*"))


async def test_a_fenced_workers_progress_touches_no_other(store: Store, quick: Settings) -> None:
    window = parse_window_id("2025-11-14T09:00")
    first, second, third = [
        await claim_window(store, window, owner=owner, lease_s=0) for owner in "abc"
    ]
    for claim, content in ((first, b"old"), (second, b"newer")):
        save_progress(quick, claim, content)
    other = Claim(window_id="2025-11-14T10:00", epoch=1, owner="a")
    save_progress(quick, other, b"another window's")

    own = take_up_progress(quick.home, third)
    assert (own / PROGRESS_FILE).read_bytes() == b"newer"
    save_progress(quick, second, b"written after it was fenced")
    assert (own / PROGRESS_FILE).read_bytes() == b"newer"
    assert (
        take_up_progress(quick.home, third) == own
        and (own / PROGRESS_FILE).read_bytes() == b"newer"
    )
    assert (
        progress_directory(quick.home, other) / PROGRESS_FILE
    ).read_bytes() == b"another window's"


def save_progress(settings: Settings, claim: Claim, content: bytes) -> None:
    """As the trainer does: another file takes the place of the one before."""
    directory = progress_directory(settings.home, claim)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "temporary").write_bytes(content)
    os.replace(directory / "temporary", directory / PROGRESS_FILE)


async def test_a_failed_window_resumes_its_stage(store: Store, quick: Settings, base: Path) -> None:
    """Cancelled by its operator, say: the window is failed, and trained again an hour later, when
    another one has become a policy that does not serve."""
    window_rows = rows(base, version=0)
    window = await scored(store, quick, 9, window_rows)

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise InterruptedError("stopped")

    with pytest.raises(InterruptedError):
        await train_window(store, quick, window, progress=stop)
    await set_state(store, window.claim, WindowState.FAILED)
    other = [msgspec.structs.replace(r, trajectory_id=f"x{r.agent_id}") for r in window_rows]
    await train_window(store, quick, await scored(store, quick, 10, other))
    after = await claim_window(
        store, parse_window_id(window.claim.window_id), owner="second", lease_s=60
    )
    steps: list[int] = []
    await train_window(
        store, quick, replace(window, claim=after), progress=lambda done, _: steps.append(done)
    )
    assert steps[0] > 1 and steps[-1] == 6

"""ART on our trainer, and our train stage on ART's: the only tests that import ``art``.

It is imported when the first of them runs: every worker of a run collects every file.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import polars as pl
import pytest
import torch

from babylon.core.artifacts import write_artifact
from babylon.core.errors import ConfigError, FencedError, TrainingError, WindowNotReadyError
from babylon.core.llm_calls import Message
from babylon.core.settings import Settings
from babylon.core.trajectories import Call, TrainingRow
from babylon.core.types import Scored
from babylon.core.windows import Window
from babylon.policies.load import load_policy
from babylon.serving.engine.loaded_policies import Policies
from babylon.stages.train import train_window
from babylon.store import Store
from babylon.store.policies import commit_policy, ensure_base, get_policy
from babylon.store.training_jobs import TrainingJob, newest_job
from babylon.store.windows import claim_window
from babylon.training.backends.art_local import update_art_local, update_on_disk
from babylon.training.backends.serverless import update_serverless
from babylon.training.backends.train_input import TrainInput
from babylon.training.grpo.config import TrainerConfig
from babylon.training.trainable import load_trainable
from babylon.training.update import Update
from babylon.training.update_health import ruled_out
from tests.calling_policy import save_calling_policy
from tests.serverless_double import KEY, ArtifactStore, Gate, ServerlessDouble, serverless_double
from tests.tiny_policy import save_tiny_policy, tiny_model, tiny_tokenizer

WINDOW = Window(datetime(2025, 11, 14, 9, tzinfo=UTC))
SERVED = "OpenPipe/Qwen3-14B-Instruct"
EAGER = TrainerConfig(iterations=2, stop_kl=10.0, stop_clip_fraction=1.0, warmup_steps=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("base"), seed=1)


def art() -> Any:
    from babylon.training.backends import art_client as client

    return client.art


def backend_in(path: Path, config: TrainerConfig = EAGER) -> Any:
    from babylon.art.backend import Backend

    return Backend(path, config=config)


def logits(path: Path | str) -> torch.Tensor:
    model, _ = load_policy(path)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(40)[None]).logits
    return result


# --- our trainer as an art().Backend ---


def trainable(base: Path, name: str = "agent") -> Any:
    return art().TrainableModel(name=name, project="demo", base_model=str(base))


async def gather(model: Any, count: int = 4) -> Any:
    """As a user of ART writes it: a group of chats of two turns, rewarded for the letter a."""
    client = model.openai_client()

    async def rollout(seed: int) -> Any:
        chat: list[Any] = [{"role": "system", "content": "Say a."}]
        for turn in ("now", "again"):
            chat.append({"role": "user", "content": turn})
            answer = await client.chat.completions.create(
                model=model.get_inference_name(),
                messages=art().Trajectory(messages_and_choices=chat).messages(),
                max_tokens=8,
                seed=seed,
            )
            chat.append(answer.choices[0])
        replies = [item.message.content or "" for item in chat[2::2]]
        return art().Trajectory(
            messages_and_choices=chat, reward=seed + len("".join(replies)) / 100
        )

    return await art().TrajectoryGroup(rollout(seed) for seed in range(count))


async def test_a_script_for_art_trains_serves_resumes(base: Path, tmp_path: Path) -> None:
    model = trainable(base)
    backend = backend_in(tmp_path)
    await model.register(backend)
    assert model.get_inference_name() == "agent@0"
    names = []
    for _ in range(2):
        group = await gather(model)
        result = await backend.train(model, [group], learning_rate=1e-3)
        await model.log([group], metrics=result.metrics, step=result.step, split="train")
        names.append(model.get_inference_name())
        assert result.metrics["loss/calls_without_logprobs"] == 0
        assert result.metrics["loss/logprob_mismatch"] < 1e-4  # what was sampled is what is trained
        assert result.metrics["data/step_trainer_tokens"] == sum(
            len(item.logprobs.content) for t in group for item in t.messages_and_choices[2::2]
        )
    assert names == ["agent@1", "agent@2"]
    answers = []
    for step in range(3):
        async with backend.adapter_lease(model, step):  # loads it again
            answers.append(await say(model, f"agent@{step}"))
    assert len(set(answers)) == 3
    await close(model, backend)
    assert len((tmp_path / "demo/models/agent/history.jsonl").read_text().splitlines()) == 2

    again, backend = trainable(base), backend_in(tmp_path)
    await again.register(backend)
    assert (await again.get_step(), again.get_inference_name()) == (2, "agent@2")
    assert await say(again, "agent@2") == answers[2]
    assert (await backend.train(again, [await gather(again)], learning_rate=1e-3)).step == 3
    await again.delete_checkpoints()
    assert [path.name for path in (tmp_path / "demo/models/agent/checkpoints").iterdir()] == [
        "0003"
    ]
    await close(again, backend)


PRICE = {
    "type": "function",
    "function": {"name": "price", "parameters": {"properties": {"ticker": {"type": "string"}}}},
}


async def test_an_agent_with_tools_trains_its_own_calls_and_no_forced_ones(tmp_path: Path) -> None:
    model, backend = trainable(save_calling_policy(tmp_path / "base")), backend_in(tmp_path)
    await model.register(backend)

    async def rollout(seed: int, choice: str) -> Any:
        chat: list[Any] = [{"role": "user", "content": "What does NVDA cost?"}]
        for _ in range(2):
            answer = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(),
                messages=art().Trajectory(messages_and_choices=chat).messages(),
                tools=[PRICE],
                tool_choice=choice,
                max_tokens=80,
                seed=seed,
            )
            chat.append(answer.choices[0])
            chat += [
                {"role": "tool", "tool_call_id": call.id, "content": "7.5"}
                for call in answer.choices[0].message.tool_calls or ()
            ]
        return art().Trajectory(messages_and_choices=chat, tools=[PRICE], reward=float(seed))

    group = await art().TrajectoryGroup(rollout(seed, "auto") for seed in range(4))
    choices = [one for t in group for one in t.messages_and_choices if not isinstance(one, dict)]
    assert {bool(one.message.tool_calls) for one in choices} == {True, False}
    trained = await backend.train(model, [group], learning_rate=1e-3)
    assert trained.step == 1
    assert trained.metrics["loss/logprob_mismatch"] < 1e-4  # prompts with tools are as served
    assert trained.metrics["data/step_trainer_tokens"] == sum(
        len(one.logprobs.content) for one in choices
    )
    forced = await art().TrajectoryGroup(rollout(seed, "required") for seed in range(2))
    assert (await backend.train(model, [forced], learning_rate=1e-3)).step == 1  # nothing to train
    from babylon.art.backend import calls_of

    with pytest.raises(TrainingError, match="fine-tuning takes plain chats"):
        list(calls_of(next(iter(group)), lambda messages, tools: [], every_reply=True))
    await close(model, backend)


async def say(model: Any, name: str) -> tuple[float, ...]:
    answer = await model.openai_client().chat.completions.create(
        model=name, messages=[{"role": "user", "content": "a"}], max_tokens=5, temperature=0
    )
    return tuple(token.logprob for token in answer.choices[0].logprobs.content)


async def close(model: Any, backend: Any) -> None:
    await model.openai_client().close()
    await backend.close()


async def test_equal_rewards_leave_the_model_where_it_is(base: Path, tmp_path: Path) -> None:
    model, backend = trainable(base), backend_in(tmp_path)
    await model.register(backend)
    group = await gather(model, 2)
    for trajectory in group:
        trajectory.reward = 1.0
    result = await backend.train(model, [group])
    assert (result.step, await model.get_step()) == (0, 0)
    assert result.metrics == {"data/step_num_groups_trainable": 0.0}
    await close(model, backend)


async def test_choices_without_token_ids_are_trained_as_text(base: Path, tmp_path: Path) -> None:
    from openai.types.chat.chat_completion import Choice

    model, backend = trainable(base), backend_in(tmp_path)
    await model.register(backend)
    chats = [
        [
            {"role": "user", "content": [{"type": "text", "text": "say a"}]},
            {"role": "assistant", "content": "an example, not sampled"},
            {"role": "user", "content": "now you"},
            Choice.model_validate(
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": reply},
                }
            ),
        ]
        for reply in ("aaa", "b")
    ]
    group = art().TrajectoryGroup(
        art().Trajectory(messages_and_choices=chat, reward=reward)
        for reward, chat in enumerate(chats)
    )
    result = await backend.train(model, [group], learning_rate=1e-3)
    assert result.metrics["loss/calls"] == result.metrics["loss/calls_without_logprobs"] == 2
    assert result.metrics["data/step_trainer_tokens"] == len("aaa") + len("b") + 2  # and their ends
    await backend.close()


async def test_supervised_tuning_makes_the_given_reply_likelier(base: Path, tmp_path: Path) -> None:
    model, backend = trainable(base), backend_in(tmp_path)
    await model.register(backend)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    config = art().TrainSFTConfig(learning_rate=[3e-3] * 4, batch_size=1)
    records = [
        record
        async for record in backend._train_sft(
            model, [art().Trajectory(messages_and_choices=chat)] * 4, config, {}
        )
    ]
    losses = [record["loss/train"] for record in records]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert (await model.get_step(), model.get_inference_name()) == (1, "agent@1")
    await backend.close()


async def test_a_leased_step_keeps_its_name_during_training(base: Path, tmp_path: Path) -> None:
    model, backend = trainable(base), backend_in(tmp_path)
    await model.register(backend)
    group = await gather(model, 2)
    async with backend.adapter_lease(model, 0):
        await backend.train(model, [group], learning_rate=1e-3)
        assert model.get_inference_name() == "agent@0"
    assert model.get_inference_name() == "agent@1"
    await close(model, backend)


async def test_options_of_other_backends_are_refused(base: Path, tmp_path: Path) -> None:
    model, backend = trainable(base), backend_in(tmp_path)
    with pytest.raises(ConfigError, match=r"train\(ppo, scale_rewards=\.\.\.\)"):
        await backend.train(model, [], ppo=True, scale_rewards=False)
    with pytest.raises(ConfigError, match="server options"):
        await model.register(backend, {"server_args": {"port": 1}})
    await backend.close()


def test_models_run_after_art_was_imported() -> None:
    """ART's patch of transformers, as it is, breaks every forward pass."""
    from babylon.training.backends.art_client import patches

    model = tiny_model(0)
    with torch.no_grad():
        assert model(input_ids=torch.arange(5)[None]).logits.shape == (1, 5, 259)
    patches.patch_preprocess_mask_arguments()
    try:
        with pytest.raises(TypeError):
            model(input_ids=torch.arange(5)[None])
    finally:
        patches.masking_utils._preprocess_mask_arguments = patches._preprocess_mask_arguments


# --- a window through a backend of ART ---


def row(name: str, score: float, *, prompt: str = "m1 0.50", reply: str = "buy") -> TrainingRow:
    tokenizer = tiny_tokenizer()
    completion = [*tokenizer.encode(reply), 258]
    call = Call(
        step=0,
        messages=(Message(role="user", content=prompt),),
        response=reply,
        prompt_token_ids=(5, 6),
        completion_token_ids=tuple(completion),
        logprobs=tuple(-5.0 for _ in completion),
    )
    return TrainingRow(
        trajectory_id=name, agent_id=name, scenario_id="s", score=score, calls=(call,)
    )


Work = Callable[..., Awaitable[TrainInput]]


@pytest.fixture
def work_for(store: Store, settings: Settings, base: Path) -> Work:
    """A new claim of a window, as the trainers take it."""

    async def make(
        window: Window = WINDOW, *, parent: int = 0, lease_s: float = 0.01, **changes: Any
    ) -> TrainInput:
        await ensure_base(store, uri=str(base), base_model=SERVED)
        claim = await claim_window(store, window, owner="worker", lease_s=lease_s)
        given: dict[str, Any] = {
            "store": store,
            "settings": settings,
            "claim": claim,
            "parent": await get_policy(store, parent),
            "rows": [row("a", 1.0), row("b", 0.0, reply="hold")],
            "target": settings.home.checkpoints / f"w{window.start.hour}-e{claim.epoch}",
            "progress_directory": settings.home.checkpoints / "progress",
            "staleness": {},
            "scored": "digest",
            "optimizer": str(base),
            "progress": None,
        }
        return TrainInput(**given | changes)

    return make


async def job_of(store: Store, window: Window = WINDOW) -> TrainingJob:
    job = await newest_job(store, window.id)
    assert job is not None
    return job


async def commit(work: TrainInput, update: Update) -> int:
    return await commit_policy(
        work.store,
        work.claim,
        parent_version=work.parent.policy_version,
        kind="lora",
        uri=str(work.target),
        base_model=work.parent.base_model,
        batch_id=f"window-{work.claim.window_id}",
        trajectory_ids=update.trajectory_ids,
        metrics=asdict(update.report),
    )


async def test_a_window_through_a_backend_on_disk_becomes_a_checkpoint_to_go_on_from(
    work_for: Work, settings: Settings, base: Path, tmp_path: Path
) -> None:
    work = await work_for()
    tied = [msgspec.structs.replace(row(n, 1.0), scenario_id="tied") for n in ("c", "d")]
    work = replace(
        work, rows=[*work.rows, *tied], settings=settings.replace(training={"learning_rate": 1e-3})
    )
    update = await update_on_disk(work, backend_in(tmp_path / "art"), tmp_path / "art")
    report: Any = update.report
    assert update.trajectory_ids == ("a", "b")
    assert (report.calls, report.trained_trajectories, report.groups_without_signal) == (
        2, 2, 1,
    )  # fmt: skip
    assert report.training_loss != 0 and report.kl_after > 0
    first = logits(work.target)
    assert not torch.equal(first, logits(base))
    assert not list((tmp_path / "art").rglob("0001"))  # moved, not copied

    await commit(work, update)
    later = await work_for(WINDOW.next(), parent=1, settings=work.settings)
    await update_on_disk(later, backend_in(tmp_path / "art"), tmp_path / "art")
    second = logits(later.target)
    assert not torch.equal(second, first)
    moved = [float((x - logits(base)).norm()) for x in (first, second)]
    assert moved[1] > moved[0]  # it went on from the first hour, not from the base model


async def test_art_local_without_its_packages_names_them(work_for: Work) -> None:
    work = await work_for()
    with pytest.raises(ConfigError, match=r"needs unsloth, .*pip install 'openpipe-art\[backend\]"):
        await update_art_local(work)


# --- a window at W&B ---


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch, base: Path) -> AsyncIterator[ServerlessDouble]:
    """W&B's training API and artifact store."""

    async def briefly(seconds: float) -> None:
        """ART looks once a second."""
        await asyncio.sleep(seconds / 50)

    monkeypatch.setattr("wandb.Api", ArtifactStore)
    art()
    monkeypatch.setattr("art.serverless.backend.asyncio", SimpleNamespace(sleep=briefly))
    monkeypatch.setattr("babylon.training.backends.serverless.POLL_S", 0.01)
    monkeypatch.setattr("babylon.training.backends.serverless.LAST_LOOK_S", 0.5)
    async with serverless_double() as double:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_TRAINING_URL", double.url)
        yield double


async def test_a_window_is_trained_at_wandb_and_the_next_hour_goes_on_from_it(
    work_for: Work, store: Store, settings: Settings, base: Path, service: ServerlessDouble
) -> None:
    seen: list[tuple[int, int]] = []
    work = await work_for(progress=lambda done, total: seen.append((done, total)))
    update = await update_serverless(work)
    report: Any = update.report
    assert update.trajectory_ids == ("a", "b")
    assert (report.training_loss, report.grad_norm, report.calls) == (0.5, 2.0, 2)
    assert seen == [(1, 2), (2, 2)]
    [sent] = service.jobs
    [group] = sent.body["trajectory_groups"]
    assert [t["reward"] for t in group["trajectories"]] == [1.0, 0.0]
    prompt, choice = group["trajectories"][0]["messages_and_choices"]
    assert prompt == {"role": "user", "content": "m1 0.50"}
    assert choice["message"]["content"] == "buy"
    tokens = [(t["token"], t["logprob"]) for t in choice["logprobs"]["content"]]
    ids = work.rows[0].calls[0].completion_token_ids or ()
    assert tokens == [(f"token_id:{i}", -5.0) for i in ids]
    assert (
        sent.body["experimental_config"]["learning_rate"]
        == settings.training.effective_learning_rate
    )
    assert sent.body["experimental_config"]["scale_rewards"] is False

    assert not torch.equal(logits(work.target), logits(base))
    assert load_trainable(work.target, "lora", 1e-5).tuning == "lora"  # torch may take over
    await commit(work, update)
    later = await work_for(WINDOW.next(), parent=1)
    await update_serverless(later)
    job = await job_of(store, WINDOW.next())
    assert (job.parent_step, job.step, job.status) == (1, 2, "done")


async def test_the_train_stage_commits_what_wandb_trained(
    work_for: Work, store: Store, settings: Settings, service: ServerlessDouble
) -> None:
    work = await work_for(lease_s=60)
    names = ("trajectory_id", "agent_id", "scenario_id", "score")
    frame = pl.DataFrame(
        [
            {name: getattr(row, name) for name in names}
            | {"calls_json": msgspec.json.encode(row.calls).decode()}
            for row in work.rows
        ]
    )
    scored = Scored(
        claim=work.claim,
        artifact=write_artifact(settings.home, frame, window_id=WINDOW.id, stage="scored"),
        eligible=2,
        agents=2,
        scorer="heuristic",
        avg_reward=0.5,
    )
    chosen = settings.replace(training={"trainer": "serverless"})
    trained = await train_window(store, chosen, scored)
    policy = await get_policy(store, trained.policy_version)
    assert (policy.kind, policy.parent_version) == ("lora", 0)
    assert policy.metrics["training_loss"] == 0.5 and policy.metrics["calls_unlogged"] == 0
    assert ruled_out(policy.metrics) is None
    served = await Policies().load("v1", policy.uri, 1)
    assert served.prompt([{"role": "user", "content": "hello"}])


async def crashed(work: TrainInput, gate: Gate) -> None:
    """The worker dies when its request has arrived and before it has the answer."""
    task = asyncio.create_task(update_serverless(work))
    await asyncio.wait_for(gate.reached.wait(), 60)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    gate.opened.set()


async def test_a_crash_while_waiting_ends_in_the_same_job(
    work_for: Work, store: Store, service: ServerlessDouble
) -> None:
    gate = service.gates["events"] = Gate()
    await crashed(await work_for(), gate)
    job = await job_of(store)
    assert (job.status, job.job_id, job.epoch) == ("running", "job-1", 1)
    await asyncio.sleep(0.02)  # the lease of the dead worker runs out
    work = await work_for()
    update = await update_serverless(work)
    assert update.trajectory_ids == ("a", "b")
    assert len(service.jobs) == 1
    assert (work.target / "adapter_model.safetensors").exists()
    job = await job_of(store)
    assert (job.status, job.epoch, job.attempt) == ("done", 2, 1)


@pytest.mark.parametrize("died", ["waiting", "after the job"])
async def test_a_window_that_was_scored_again_is_trained_on_its_new_scores(
    work_for: Work, store: Store, service: ServerlessDouble, died: str
) -> None:
    if died == "waiting":
        gate = service.gates["events"] = Gate()
        await crashed(await work_for(), gate)
    else:
        await update_serverless(await work_for())
    await asyncio.sleep(0.02)
    anew = await work_for(rows=[row("a", 0.0), row("c", 1.0)], scored="anew")
    update = await update_serverless(anew)
    assert update.trajectory_ids == ("a", "c")
    assert service.deleted == [1]  # so that the second job starts from the base model
    rewards = [
        [t["reward"] for t in job.body["trajectory_groups"][0]["trajectories"]]
        for job in service.jobs
    ]
    assert rewards == [[1.0, 0.0], [0.0, 1.0]]
    job = await job_of(store)
    assert (job.status, job.attempt, job.scored) == ("done", 2, "anew")


async def test_a_crash_before_the_answer_ends_in_the_checkpoint_of_the_unknown_job(
    work_for: Work, store: Store, service: ServerlessDouble
) -> None:
    gate = service.gates["submit"] = Gate()
    await crashed(await work_for(), gate)
    job = await job_of(store)
    assert (job.status, job.job_id) == ("submitting", None)
    await asyncio.sleep(0.02)
    resumed = asyncio.create_task(update_serverless(await work_for()))
    service.run(service.jobs[0])
    assert (await resumed).trajectory_ids == ("a", "b")
    assert len(service.jobs) == 1


async def test_a_submission_that_never_arrived_is_given_up_at_its_deadline_and_made_anew(
    work_for: Work, store: Store, service: ServerlessDouble
) -> None:
    gate = service.gates["submit"] = Gate()
    await crashed(await work_for(), gate)
    service.jobs.clear()  # it never arrived
    await store.pool.execute("UPDATE babylon.training_jobs SET deadline = now()")
    await asyncio.sleep(0.02)
    with pytest.raises(TrainingError, match="did not end in time"):
        await update_serverless(await work_for())
    await asyncio.sleep(0.02)
    await update_serverless(await work_for())
    assert len(service.jobs) == 1
    job = await job_of(store)
    assert (job.status, job.attempt) == ("done", 2)


async def test_a_worker_that_lost_its_window_cannot_record_its_job(
    work_for: Work, store: Store, service: ServerlessDouble
) -> None:
    gate = service.gates["submit"] = Gate()
    slow = asyncio.create_task(update_serverless(await work_for()))
    await gate.reached.wait()
    await asyncio.sleep(0.02)
    await claim_window(store, WINDOW, owner="other", lease_s=60)
    gate.opened.set()
    with pytest.raises(FencedError, match="epoch 2 took it over"):
        await slow
    job = await job_of(store)
    assert job.status == "submitting"


async def test_an_overdue_job_is_an_error_and_the_run_after_it_submits_another(
    work_for: Work, store: Store, settings: Settings, service: ServerlessDouble
) -> None:
    service.ending = "hangs"
    short = settings.replace(prefect={"stage_timeout_s": 1.5})
    with pytest.raises(TrainingError, match=r"did not end in time \(STAGE_TIMEOUT_SECONDS=1.5\)"):
        await update_serverless(await work_for(settings=short))
    await asyncio.sleep(0.02)
    service.ending = "ends"
    await update_serverless(await work_for())
    job = await job_of(store)
    assert (job.status, job.attempt) == ("done", 2)


async def test_a_failed_job_says_why_and_may_be_tried_again(
    work_for: Work, store: Store, service: ServerlessDouble
) -> None:
    service.ending = "fails"
    with pytest.raises(TrainingError, match="the GPUs are on fire"):
        await update_serverless(await work_for())
    job = await job_of(store)
    assert job.status == "failed" and "on fire" in (job.reason or "")
    await asyncio.sleep(0.02)
    service.ending = "ends"
    await update_serverless(await work_for())
    assert len(service.jobs) == 2


@pytest.mark.parametrize(("status", "left"), [(402, "failed"), (503, "submitting")])
async def test_a_refused_submission_is_told_from_one_of_unknown_fate(
    work_for: Work, store: Store, service: ServerlessDouble, status: int, left: str
) -> None:
    service.refusal = status
    with pytest.raises(TrainingError, match="no credit"):
        await update_serverless(await work_for())
    job = await job_of(store)
    assert job.status == left


async def test_a_service_out_of_reach_or_a_wrong_key_is_one_line(
    work_for: Work, store: Store, service: ServerlessDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await work_for()
    monkeypatch.setenv("WANDB_API_KEY", "another-key-altogether")
    with pytest.raises(ConfigError, match=r"rejects WANDB_API_KEY .*unknown key") as caught:
        await update_serverless(work)
    assert "another-key" not in str(caught.value)
    monkeypatch.setenv("WANDB_TRAINING_URL", "http://127.0.0.1:1/v1")
    with pytest.raises(TrainingError, match="training API, window 2025-11-14T09:00: Connection"):
        await update_serverless(work)
    assert await newest_job(store, WINDOW.id) is None


async def test_a_job_that_cannot_be_looked_at_is_left_to_the_next_run(
    work_for: Work, store: Store, service: ServerlessDouble
) -> None:
    service.events_status = 404
    with pytest.raises(TrainingError, match=r"no events today.*next run continues from here"):
        await update_serverless(await work_for())
    job = await job_of(store)
    assert job.status == "running"
    await asyncio.sleep(0.02)
    service.events_status = None
    await update_serverless(await work_for())
    assert len(service.jobs) == 1


async def test_an_artifact_that_does_not_come_is_fetched_by_the_next_run(
    work_for: Work, service: ServerlessDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: int, **options: Any) -> None:
        raise ValueError("artifact not found")

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactStore, "_download", staticmethod(refuse))
        with pytest.raises(TrainingError, match=r"checkpoint 1 of model babylon .ValueError at"):
            await update_serverless(await work_for())
    await asyncio.sleep(0.02)
    await update_serverless(await work_for())
    assert len(service.jobs) == 1


async def test_a_job_of_a_champion_that_was_rolled_back_is_waited_for_and_dropped(
    work_for: Work, store: Store, base: Path, service: ServerlessDouble
) -> None:
    first = await work_for()
    await commit(first, await update_serverless(first))
    gate = service.gates["events"] = Gate()
    await crashed(await work_for(WINDOW.next(), parent=1), gate)
    await asyncio.sleep(0.02)
    again = await work_for(WINDOW.next(), parent=0)
    await update_serverless(again)
    assert len(service.jobs) == 3
    assert service.deleted == [1, 2]  # so that the third starts from the base model
    job = await job_of(store, WINDOW.next())
    assert (job.attempt, job.parent_step, job.step) == (2, 0, 1)


async def test_a_rejected_challenger_is_taken_back_before_the_next_job(
    work_for: Work, service: ServerlessDouble
) -> None:
    work = await work_for()
    await commit(work, await update_serverless(work))  # version 1 is checkpoint 1, and lost
    later = await work_for(WINDOW.next(), parent=0)
    await update_serverless(later)
    assert service.deleted == [1]
    last = await work_for(WINDOW.next().next(), parent=1)
    with pytest.raises(ConfigError, match="trained from an earlier checkpoint since"):
        await update_serverless(last)  # checkpoint 1 is another policy's now
    assert len(service.jobs) == 2


async def test_an_update_that_was_not_committed_is_not_bought_twice(
    work_for: Work, service: ServerlessDouble
) -> None:
    first = await work_for()
    await update_serverless(first)
    made = logits(first.target)
    shutil.rmtree(first.target)  # claims that can commit no more are swept
    await asyncio.sleep(0.02)
    second = await work_for()
    update = await update_serverless(second)
    assert update.trajectory_ids == ("a", "b") and len(service.jobs) == 1
    assert torch.equal(logits(second.target), made)


async def test_one_model_is_trained_by_one_job_at_a_time(
    work_for: Work, service: ServerlessDouble
) -> None:
    gate = service.gates["events"] = Gate()
    first = asyncio.create_task(update_serverless(await work_for()))
    await gate.reached.wait()
    with pytest.raises(TrainingError, match=r"still trains window 2025-11-14T09:00 \(job job-1\)"):
        await update_serverless(await work_for(WINDOW.next()))
    gate.opened.set()
    await first
    assert len(service.jobs) == 1


async def test_a_model_that_others_trained_is_not_touched(
    work_for: Work, service: ServerlessDouble
) -> None:
    service.checkpoints["id-of-babylon"] = [0, 1, 2, 3, 4]
    for _ in range(2):  # a second try does not make them ours
        with pytest.raises(ConfigError, match="did not train: set MODEL_NAME"):
            await update_serverless(await work_for())
        await asyncio.sleep(0.02)
    assert service.deleted == [] and service.jobs == []


async def test_secrets_stay_at_home(work_for: Work, service: ServerlessDouble) -> None:
    rows = [
        row("a", 1.0, prompt=f"mail ann@example.org, key {KEY}"),
        row("b", 0.0, reply="hold"),
        row("c", 0.5, reply="my key is sk-abcdefghijklmnop0123"),
    ]
    update = await update_serverless(await work_for(rows=rows))
    assert update.trajectory_ids == ("a", "b")
    report: Any = update.report
    assert (report.calls_redacted, report.calls_with_secrets) == (1, 1)
    sent = json.dumps(service.jobs[0].body)
    assert "mail [REDACTED:email], key [REDACTED:key]" in sent
    assert not any(secret in sent for secret in ("ann@", KEY, "sk-abc"))


Change = Callable[[TrainInput], TrainInput]


REFUSED: list[tuple[Change, type[Exception], str]] = [
    (
        lambda w: replace(w, parent=replace(w.parent, base_model="tiny")),
        ConfigError,
        "does not train tiny, only OpenPipe/Qwen3-14B-Instruct and",
    ),
    (
        lambda w: replace(w, parent=replace(w.parent, kind="lora", policy_version=3)),
        ConfigError,
        "policy 3 was not trained at W&B",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
async def test_what_wandb_cannot_train_is_refused_before_anything_is_sent(
    work_for: Work, service: ServerlessDouble, change: Change, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await update_serverless(change(await work_for()))
    assert service.models == {}


async def test_a_window_without_signal_buys_nothing(
    work_for: Work, store: Store, service: ServerlessDouble
) -> None:
    rows = [row("a", 1.0), row("b", 1.0)]
    with pytest.raises(WindowNotReadyError, match="differing scores"):
        await update_serverless(await work_for(rows=rows))
    assert service.jobs == [] and await newest_job(store, WINDOW.id) is None

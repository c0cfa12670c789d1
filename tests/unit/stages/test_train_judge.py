"""Training a judge: lessons from earlier windows, rewards of answers, and a tiny model."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from babylon.core.errors import ScoringError, WindowNotReadyError
from babylon.policies.load import _full
from babylon.scoring.judge.judge_client import LocalJudge
from babylon.scoring.judge.judgment import GroundTruth, JudgeConfig, Rubric, fitting
from babylon.scoring.judge.prompt import parse_reply
from babylon.stages.train_judge import (
    JudgeTraining,
    OutcomeWindow,
    compare,
    judged_by,
    lessons,
    prepare,
    reward,
    split_by_time,
    train_judge,
)
from babylon.training.grpo.config import TrainerConfig
from babylon.training.trainable import TuningOptions
from benchmarks.judge_train import outcome_window
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.judged import SCALE, judged, step
from tests.tiny_policy import tiny_model, tiny_tokenizer

CONFIG = JudgeConfig(
    list_size=1,
    rubric=Rubric(name="tiny", text="Profit."),
    context_tokens=2048,
)


def window(hour, *profits, scenario="s"):
    plays = tuple(
        judged(f"{hour}-{n}", profit, [step(0, said="b")], scenario=scenario)
        for n, profit in enumerate(profits)
    )
    return OutcomeWindow(window_id=f"2025-11-14T{hour:02}:00", judged=plays, truth=GroundTruth())


WINDOWS = [window(2, 5.0, -5.0), window(0, 10.0, -90.0, 40.0), window(1, 0.0, 20.0)]


TAUGHT = prepare(WINDOWS, CONFIG)


def test_windows_are_split_by_time_and_share_no_trajectory():
    early, late = split_by_time(WINDOWS, 0.3)
    assert [one.window_id[11:13] for one in early] == ["00", "01"]
    assert [one.window_id[11:13] for one in late] == ["02"]
    with pytest.raises(WindowNotReadyError, match=r"1 windows .* cannot be split"):
        split_by_time(WINDOWS[:1], 0.3)
    again = replace(late[0], window_id=f"{late[0].window_id}+judged-again")
    assert split_by_time([*WINDOWS, again], 0.3) == (early, [again])


def test_windows_of_the_benchmark_can_be_split():
    early, late = split_by_time([outcome_window(2, seed) for seed in range(4)], later=0.5)
    assert [window.window_id for window in (*early, *late)] == ["0000", "0001", "0002", "0003"]


def test_the_right_score_is_the_share_of_earlier_plays_that_earned_less():
    taught = {one.trajectory_id: one for one in lessons(TAUGHT)}
    assert taught["t-0-1"].right == 0 and taught["t-0-2"].right == 1
    middle = taught["t-2-0"]
    assert middle.right == pytest.approx(3 / 6)
    assert parse_reply(middle.prompt, middle.reply).scores == (0.5,)
    again = {one.trajectory_id: one for one in lessons(TAUGHT, 1)}
    assert again["t-2-0"].prompt.hash != middle.prompt.hash


def test_an_answer_is_rewarded_by_its_distance_and_babble_is_not():
    lesson = next(one for one in lessons(TAUGHT) if one.right == 1)
    assert reward(lesson, lesson.reply) == 1
    assert reward(lesson, '{"explanation":"","score":0.25}') == 0.25
    assert reward(lesson, "profit!") == reward(lesson, '{"score":7}') == 0


def test_a_judge_is_compared_with_the_heuristic_and_a_random_one():
    windows = [window(hour, *[float(n * n) for n in range(8)]) for hour in range(6)]
    found = {one.name: one for one in compare({"none": []}, windows, 0)}
    assert found["none"].agreement is None and found["none"].judged == 0
    assert found["heuristic"].agreement.correlation > 0.9
    assert abs(found["random"].agreement.correlation) < 0.6
    assert found["random"].judged == found["heuristic"].judged == 48


def test_sft_and_grpo_write_the_checkpoint_with_the_best_reward(tmp_path, monkeypatch):
    """A model that cannot judge yet: its reward here is the number of letters that it uses."""
    monkeypatch.setattr(
        "babylon.stages.train_judge.reward", lambda lesson, text: len(set(text)) / 64
    )
    base, target = tmp_path / "base", tmp_path / "judge"
    tiny_model(0, max_position_embeddings=4096).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    options = JudgeTraining(epochs=2, rounds=1, prompts=2, answers=4, batch_size=2)
    trainer = TrainerConfig(learning_rate=1e-3, iterations=2, warmup_steps=0)
    lines: list[str] = []
    losses, rewards = train_judge(base, WINDOWS[1:], target, CONFIG, trainer, options, lines.append)
    assert losses[-1] < losses[0] and len(losses) == 5
    assert len(rewards) == 2 and len(lines) == 3
    assert (target / "config.json").exists()
    served = fitting(JudgeConfig(rubric=CONFIG.rubric), target, 4096)
    assert (served.list_size, served.context_tokens) == (1, CONFIG.context_tokens)
    assert fitting(JudgeConfig(rubric=CONFIG.rubric), base, 4096).list_size == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "judge"]


def test_a_judge_above_a_base_in_16_bits_is_trained_and_answers_there(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "babylon.stages.train_judge.reward", lambda lesson, text: len(set(text)) / 64
    )
    kinds = []

    def full(*arguments, **options):
        model = _full(*arguments, **options)
        kinds.append({weight.dtype for weight in model.model.layers.parameters()})
        return model

    monkeypatch.setattr("babylon.policies.load._full", full)
    base, target = tmp_path / "base", tmp_path / "judge"
    tiny_model(0, max_position_embeddings=4096).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    options = JudgeTraining(
        epochs=2,
        rounds=1,
        prompts=2,
        answers=4,
        batch_size=2,
        tuning="lora",
        weights=TuningOptions(rank=2, base_precision="bf16"),
    )
    trainer = TrainerConfig(learning_rate=1e-3, iterations=2, warmup_steps=0)
    losses, _ = train_judge(base, WINDOWS[1:], target, CONFIG, trainer, options)
    assert losses[-1] < losses[0]
    # SFT, the update, and the answers before and after it
    assert len(kinds) >= 3 and all(kind == {torch.bfloat16} for kind in kinds)
    assert json.loads((target / "adapter_config.json").read_text())["r"] == 2


async def test_a_judge_of_this_machine_has_its_own_time_for_an_answer(tmp_path, monkeypatch):
    @asynccontextmanager
    async def slow(path, log_file):
        async with LoopbackJudge(Mind(scale=SCALE, delay_s=0.3)) as judge:
            yield LocalJudge(
                base_url=judge.base_url, api_key="none", name="mine", context_tokens=4096
            )

    monkeypatch.setattr("babylon.stages.train_judge.local_judge", slow)
    monkeypatch.setattr("babylon.scoring.judge.cached_judge._BACKOFF_S", 0.0)
    groups = await judged_by(tmp_path, WINDOWS[:1], CONFIG, tmp_path / "log", 30.0)
    assert [len(one.opinions) for one in groups] == [2]
    with pytest.raises(ScoringError, match="timed out"):
        await judged_by(tmp_path, WINDOWS[:1], CONFIG, tmp_path / "log", 0.05)

"""Self-distillation from words: its gradient, its teacher, and what the student never sees."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from babylon.core.errors import WindowNotReadyError
from babylon.core.learning_settings import Objective
from babylon.core.preferences import DecisionWords
from babylon.core.trajectories import Payoff, TrainingRow
from babylon.policies.tokenizer import render_prompt
from babylon.stages.words import Said, decision_words
from babylon.training import progress_file as journal
from babylon.training import update as updates
from babylon.training.grpo.advantage import advantages
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.training_input import ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError, compile_window
from babylon.training.preferences.objective import Preferences
from babylon.training.teacher_prompt import teacher_prompt
from babylon.training.update import update_checkpoint
from babylon.training.update_result import Update
from tests.tiny_policy import tiny_model, tiny_tokenizer
from tests.trajectories import a_trajectory
from tests.unit.training.grpo.trees import naive_logprobs
from tests.unit.training.grpo.windows import relative_error, trained_gradient, window
from tests.unit.training.grpo.windows import update as updated
from tests.unit.training.test_update import CONFIG, MESSAGES, call, logits

REASON, TRUTH = "TIMID-AND-LATE", "RESOLVES-YES-AT-NOON"


def told(trajectories: list[ScoredTrajectory], share: float = 1.0) -> list[ScoredTrajectory]:
    """The window with words for the teacher on a share of its calls."""
    random = Random(7)

    def some() -> list[int]:
        return [random.randrange(2, 50) for _ in range(random.randint(1, 9))]

    return [
        replace(
            own,
            calls=[
                replace(one, hindsight=[*one.prompt, *some()]) if random.random() < share else one
                for one in own.calls
            ],
        )
        for own in trajectories
    ]


def tied(trajectories: list[ScoredTrajectory]) -> list[ScoredTrajectory]:
    return [replace(own, score=0.5) for own in trajectories]


def naive(model: Any, trajectories: list[ScoredTrajectory], weight: float) -> torch.Tensor:
    """The formulas one call at a time: one full-window step from p, so r = 1."""
    gain = advantages(trajectories)
    kept = [
        replace(own, calls=[c for c in own.calls if own.trajectory_id in gain or c.hindsight])
        for own in trajectories
    ]
    kept = [own for own in kept if own.calls]
    calls = [one for own in kept for one in own.calls]
    mean_length = sum(len(one.completion) for one in calls) / len(calls)
    size = sum(abs(gain.get(own.trajectory_id, 0.0)) * len(own.calls) for own in kept) / len(calls)
    scale = weight * size or 1.0
    loss = torch.zeros(())
    for own in kept:
        for one in own.calls:
            theta = naive_logprobs(model, one)
            mu = theta.detach() if one.logprobs is None else torch.tensor(one.logprobs)
            w = torch.exp(theta.detach() - mu).clamp(max=2)
            advantage = torch.full_like(w, gain.get(own.trajectory_id, 0.0))
            if one.hindsight:
                teacher = naive_logprobs(model, replace(one, prompt=one.hindsight)).detach()
                advantage = advantage + scale * (teacher - theta.detach()).clamp(-5, 5)
            share = 1 / (len(kept) * len(own.calls) * mean_length)
            loss = loss - share * (w * advantage * theta).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_gradient_is_that_of_the_formulas(share: float, known: bool) -> None:
    trajectories = told(window(1, known=known), share)
    ours = trained_gradient(tiny_model(0), trajectories, words_weight=0.7)
    assert relative_error(ours, naive(tiny_model(0), trajectories, 0.7)) < 1e-5
    portions = trained_gradient(tiny_model(0), trajectories, words_weight=0.7, max_tokens=20)
    assert relative_error(portions, ours) < 1e-5
    scores_alone = trained_gradient(tiny_model(0), window(1, known=known))
    assert relative_error(ours, scores_alone) > 0.01
    silent = trained_gradient(tiny_model(0), trajectories, words_weight=0.0)
    assert relative_error(silent, scores_alone) < 1e-6


def test_words_teach_also_where_scores_tie() -> None:
    plain = tied(window(2))
    with pytest.raises(NothingToTrainError, match="differing scores"):
        compile_window(plain, TrainerConfig())
    words = told(plain, 0.6)
    ours = trained_gradient(tiny_model(0), words)
    assert float(ours.norm()) > 1e-3
    assert relative_error(ours, naive(tiny_model(0), words, 1.0)) < 1e-5
    # one group ties, the other does not: both teach
    first, second = window(2)[:4], tied(window(2))[4:]
    mixed = trained_gradient(tiny_model(0), [*first, *told(second)])
    assert relative_error(mixed, naive(tiny_model(0), [*first, *told(second)], 0.1)) < 1e-5
    assert relative_error(mixed, trained_gradient(tiny_model(0), [*first, *second])) > 1e-3


def test_the_student_approaches_its_teacher() -> None:
    report = updated(tiny_model(0), told(tied(window())), iterations=6, stop_kl=9.0)
    assert report.calls_with_words == report.calls
    assert report.teacher_before > report.teacher_after
    assert updated(tiny_model(0), window()).teacher_before == 0


def rows() -> list[TrainingRow]:
    """Two agents at one moment, with equal scores."""
    return [
        TrainingRow(
            trajectory_id=name, agent_id=name, scenario_id="s", score=0.5, calls=(call(name),)
        )
        for name in ("buy", "hold")
    ]


def words() -> tuple[DecisionWords, ...]:
    """What a stage gathers: a judge's reason, a truth that it quotes, and the outcomes."""
    played = [
        a_trajectory(name, pnl_usd=pnl, payoffs=(Payoff(step=0, pnl_usd=pnl),))
        for name, pnl in (("buy", 31.25), ("hold", 0.0))
    ]
    said: Said = {("hold", None): [REASON], ("buy", 0): [TRUTH]}
    return tuple(decision_words(rows(), played, said))


def learn(parent: Path, target: Path, objective: Objective, **changes: Any) -> Update:
    given = Preferences(objective=objective, words=changes.pop("words", words()))
    config = changes.pop("config", CONFIG)
    return update_checkpoint(
        parent, rows(), target, tuning="lora", config=config, preferences=given, **changes
    )


def test_words_tell_the_reasons_the_outcome_and_a_better_answer() -> None:
    buy, hold = (one.text for one in words())
    assert REASON in hold and "$+0.00" in hold and "would have made $+31.25: buy" in hold
    assert TRUTH in buy and "$+31.25" in buy and "would have" not in buy
    assert decision_words(rows(), [], {}) == []
    # of two calls of one step, each has a text of its own
    both = msgspec.structs.replace(rows()[0], calls=(call("think"), call("sell")))
    found = decision_words([both], [], {("buy", 0): [REASON]})
    assert [(one.call, one.text.splitlines()[1]) for one in found] == [(0, "think"), (1, "sell")]


def test_no_truth_and_no_reason_reaches_the_student(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward pass is read: words are in the teacher's, which has no gradient, alone."""
    passes: list[tuple[bool, str]] = []
    load = updates.load_share

    def watched(*given: Any, **named: Any) -> Any:
        trainable = load(*given, **named)

        def note(_: Any, args: Any, kwargs: Any) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            text = trainable.tokenizer.decode(ids.flatten().tolist())
            passes.append((torch.is_grad_enabled(), text))

        decoder = trainable.model.get_base_model().model
        decoder.register_forward_pre_hook(note, with_kwargs=True)
        return trainable

    monkeypatch.setattr(updates, "load_share", watched)
    learn(parent, tmp_path / "v1", "sdpo")
    secrets = (REASON, TRUTH, "31.25", "In hindsight")
    taught = [text for trains, text in passes if not trains]
    student = [text for trains, text in passes if trains]
    assert all(any(secret in text for text in taught) for secret in secrets)
    assert any("m1 0.50" in text for text in student)
    assert not any(secret in text for text in student for secret in secrets)
    assert not any(s in json.dumps(msgspec.to_builtins(rows())) for s in secrets)
    trees = compile_window(
        [
            replace(own, calls=[replace(one, hindsight=(250, 251, 252)) for one in own.calls])
            for own in window()
        ],
        TrainerConfig(),
    )
    assert not any({250, 251, 252} & {*ids.tolist()} for ids in trees.tree.ids)


def test_objectives_of_words_differ_and_need_words(parent: Path, tmp_path: Path) -> None:
    apart = learn(parent, tmp_path / "sdpo", "sdpo")
    assert apart.trajectory_ids == ("buy", "hold")
    assert (logits(tmp_path / "sdpo") - logits(parent)).abs().max() > 1e-4
    scored = [msgspec.structs.replace(row, score=float(n)) for n, row in enumerate(rows())]
    for name in ("grpo", "grpo+sdpo", "sdpo"):
        given = Preferences(objective=name, words=words())  # type: ignore[arg-type]
        if name == "grpo":
            given = replace(given, words=())
        update_checkpoint(
            parent, scored, tmp_path / f"2{name}", tuning="lora", config=CONFIG, preferences=given
        )
    first, both, alone = (logits(tmp_path / f"2{n}") for n in ("grpo", "grpo+sdpo", "sdpo"))
    assert (first - both).abs().max() > 1e-5 and (both - alone).abs().max() > 1e-5
    assert torch.equal(alone, logits(tmp_path / "sdpo"))  # it ignores scores
    with pytest.raises(WindowNotReadyError, match="feedback in words"):
        learn(parent, tmp_path / "none", "sdpo", words=())


def test_an_update_from_words_resumes_with_the_same_teacher(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, iterations=4)
    whole = learn(parent, tmp_path / "whole", "sdpo", config=config)
    monkeypatch.setattr(journal, "PATIENCE", 0)

    def stop(done: int, _: int) -> None:
        if done == 3:
            raise InterruptedError

    place = {"config": config, "progress_directory": tmp_path / "progress"}
    with pytest.raises(InterruptedError):
        learn(parent, tmp_path / "ended", "sdpo", progress=stop, **place)
    steps: list[int] = []
    resumed = learn(
        parent, tmp_path / "ended", "sdpo", progress=lambda done, _: steps.append(done), **place
    )
    assert steps[0] > 1
    assert resumed.report.teacher_before == whole.report.teacher_before  # type: ignore[union-attr]
    assert (logits(tmp_path / "ended") - logits(tmp_path / "whole")).abs().max() < 1e-6


def test_a_teachers_prompt_is_the_recorded_one_with_words_at_its_end() -> None:
    tokenizer = tiny_tokenizer()
    prompt = render_prompt(tokenizer, MESSAGES)
    found = teacher_prompt(tokenizer, call("buy"), prompt, REASON, 999)
    text = tokenizer.decode(found)
    assert text.startswith("<|im_start|>system\nTrade.") and text.endswith("assistant\n")
    assert text.index("m1 0.50") < text.index(REASON)
    # without the recorded prompt's exact tokens, or without room, there is no teacher
    assert teacher_prompt(tokenizer, call("buy"), prompt[1:], REASON, 999) == ()
    assert teacher_prompt(tokenizer, call("buy"), prompt, REASON, len(prompt)) == ()
    parts = call("buy", messages=({"role": "user", "content": [{"type": "text", "text": "m1"}]},))
    assert teacher_prompt(tokenizer, parts, prompt, REASON, 999) == ()
    answered = call("buy", messages=(*MESSAGES, {"role": "tool", "content": "42"}))
    own = render_prompt(tokenizer, answered.messages)
    assert REASON in tokenizer.decode(teacher_prompt(tokenizer, answered, own, REASON, 999))

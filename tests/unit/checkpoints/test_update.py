"""A window's update on disk, full and LoRA, with exact and with retokenized calls."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedTokenizerBase

from babylon.checkpoints.load import load_policy
from babylon.checkpoints.trainable import Tuning, load_trainable
from babylon.checkpoints.update import scored_trajectories, update_checkpoint
from babylon.errors import ModelError, TrainingError, WindowNotReadyError
from babylon.grpo.loss import LossConfig
from babylon.grpo.trainer import TrainerConfig, TrainReport
from babylon.trajectories import Call, Message, TrainingRow
from tests.tiny_policy import save_tiny_policy, tiny_tokenizer

MESSAGES = (Message(role="system", content="Trade."), Message(role="user", content="m1 0.50"))
CONFIG = TrainerConfig(iterations=2, learning_rate=1e-3, stop_kl=10.0, stop_clip_fraction=1.0)


def call(response: str, **changes: object) -> Call:
    return Call(**{"step": 0, "messages": MESSAGES, "response": response, **changes})  # type: ignore[arg-type]


def rows(score: float = 1.0) -> list[TrainingRow]:
    return [
        TrainingRow(
            trajectory_id=name, agent_id=name, scenario_id="s", score=value, calls=(call(name),)
        )
        for name, value in (("buy", score), ("hold", 0.0))
    ]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("parent"), seed=0)


def update(
    parent: Path, target: Path, tuning: Tuning, config: TrainerConfig = CONFIG
) -> TrainReport:
    return update_checkpoint(parent, rows(), target, tuning=tuning, config=config).report


def logits(path: Path) -> torch.Tensor:
    model, _ = load_policy(path)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(40)[None]).logits
    return result


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_an_update_is_saved_so_that_it_loads_and_differs(
    parent: Path, tmp_path: Path, tuning: Tuning
) -> None:
    report = update(parent, tmp_path / "v1", tuning)
    assert report.calls_without_logprobs == report.calls == 2
    assert report.kl_after > 0
    assert not torch.equal(logits(tmp_path / "v1"), logits(parent))


def test_only_what_moved_the_policy_counts_as_trained(parent: Path, tmp_path: Path) -> None:
    tied = [
        replace(row, trajectory_id=f"tied-{row.agent_id}", scenario_id="tied", score=1.0)
        for row in rows()
    ]
    greedy = replace(rows()[0], trajectory_id="greedy", calls=(call("buy", temperature=0.0),))
    window = [*rows(), *tied, greedy]
    made = update_checkpoint(parent, window, tmp_path / "v1", tuning="full", config=CONFIG)
    assert made.trajectory_ids == ("buy", "hold")
    assert made.report.trained_trajectories == 2


def test_an_adapter_leaves_its_base_alone_and_chains(parent: Path, tmp_path: Path) -> None:
    before = logits(parent)
    update(parent, tmp_path / "v1", "lora")
    update(tmp_path / "v1", tmp_path / "v2", "lora")
    assert torch.equal(logits(parent), before)
    assert (tmp_path / "v2" / "adapter_config.json").exists()
    assert not (tmp_path / "v2" / "model.safetensors").exists()
    assert not torch.equal(logits(tmp_path / "v2"), logits(tmp_path / "v1"))


def test_full_tuning_on_an_adapter_merges_it_first(parent: Path, tmp_path: Path) -> None:
    update(parent, tmp_path / "v1", "lora")
    update(
        tmp_path / "v1", tmp_path / "v2", "full", TrainerConfig(iterations=1, learning_rate=1e-9)
    )
    torch.testing.assert_close(
        logits(tmp_path / "v2"), logits(tmp_path / "v1"), atol=1e-4, rtol=1e-4
    )


def test_the_optimiser_goes_on_where_the_last_window_left_it(parent: Path, tmp_path: Path) -> None:
    update(parent, tmp_path / "v1", "full")
    carried = load_trainable(tmp_path / "v1", "full", 1e-3).optimizer
    assert carried.state and carried.param_groups[0]["lr"] == 1e-3
    assert not load_trainable(tmp_path / "v1", "lora", 1e-3).optimizer.state  # other parameters


def test_a_window_without_signal_writes_nothing(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(WindowNotReadyError, match="differing scores"):
        update_checkpoint(parent, rows(score=0.0), tmp_path / "v1", tuning="full", config=CONFIG)
    assert not list(tmp_path.iterdir())


def test_a_diverging_update_writes_nothing(parent: Path, tmp_path: Path) -> None:
    wild = TrainerConfig(
        iterations=3, learning_rate=1e30, stop_kl=1e30, stop_clip_fraction=2.0, grad_clip=1e30
    )
    with pytest.raises(TrainingError, match="lower the learning rate"):
        update(parent, tmp_path / "v1", "full", wild)
    assert not list(tmp_path.iterdir())


def test_a_kl_penalty_needs_a_frozen_reference(parent: Path, tmp_path: Path) -> None:
    config = TrainerConfig(iterations=1, loss=LossConfig(kl_penalty=0.1))
    with pytest.raises(ModelError, match="TUNING=lora"):
        update(parent, tmp_path / "v1", "full", config)
    assert update(parent, tmp_path / "v2", "lora", config).train_steps == 1


def tokens(changes: dict[str, object], context: int = 512) -> tuple[list[object], dict[str, int]]:
    tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()
    row = TrainingRow(
        trajectory_id="t",
        agent_id="a",
        scenario_id="s",
        score=1.0,
        calls=(call("hold", **changes),),
    )
    trajectories, excluded = scored_trajectories(tokenizer, [row], context)
    calls: list[object] = [c for t in trajectories for c in t.calls]
    return calls, {name: getattr(excluded, name) for name in excluded.__slots__}


def test_logged_tokens_are_trained_exactly_as_they_were_sampled() -> None:
    logged = {
        "prompt_token_ids": (5, 6),
        "completion_token_ids": (7, 8, 258),
        "logprobs": (-0.1, -0.2, -0.3),
        "temperature": 0.7,
    }
    [exact], _ = tokens(logged)
    assert {name: getattr(exact, name) for name in ("prompt", "completion", "logprobs")} == {
        "prompt": (5, 6),
        "completion": (7, 8, 258),
        "logprobs": (-0.1, -0.2, -0.3),
    }


def test_text_alone_is_tokenised_with_template_and_end_and_without_logprobs() -> None:
    [made], _ = tokens({})
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.decode(made.prompt)  # type: ignore[attr-defined]
    assert prompt.endswith("<|im_start|>assistant\n") and "m1 0.50" in prompt
    assert tokenizer.decode(made.completion) == "hold<|im_end|>"  # type: ignore[attr-defined]
    assert made.logprobs is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "context", "reason"),
    [
        ({"temperature": 0.0}, 512, "greedy"),
        ({}, 10, "too_long"),
        ({"prompt_token_ids": (1,), "completion_token_ids": (), "logprobs": ()}, 512, "empty"),
        ({"untrainable": "top_p 0.9"}, 512, "untrainable"),
    ],
)
def test_a_call_that_cannot_be_trained_is_left_out_and_counted(
    changes: dict[str, object], context: int, reason: str
) -> None:
    calls, excluded = tokens(changes, context)
    assert not calls
    assert excluded == {"greedy": 0, "too_long": 0, "empty": 0, "untrainable": 0} | {reason: 1}

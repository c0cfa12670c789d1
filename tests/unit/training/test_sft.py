"""Supervised fine-tuning on recorded chats, by the command line."""

import asyncio
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner

from babylon.cli import app
from babylon.core.errors import TrainingError
from babylon.core.trajectories import Call, TrainingRow
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.training.grpo import forward, tree_forward
from babylon.training.sft import fine_tune
from babylon.training.trainable import load_trainable
from tests.tiny_policy import save_tiny_policy, tiny_tokenizer

ASK = {"role": "user", "content": "BUY or HOLD?"}


def write_chats(path: Path, reply: str = "HOLD", count: int = 60) -> Path:
    chat = {"messages": [ASK, {"role": "assistant", "content": reply}]}
    path.write_text("".join(json.dumps(chat) + "\n" for _ in range(count)))
    return path


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_base_model_learns_the_replies_of_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tuning: str
) -> None:
    base = save_tiny_policy(tmp_path / "base", seed=0)
    monkeypatch.setenv("BASE_MODEL", str(base))
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path / "home"))
    target = tmp_path / "taught"
    chats = write_chats(tmp_path / "chats.jsonl")
    asked = {"id": "c", "type": "function", "function": {"name": "quote", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [asked]}
    with chats.open("a") as file:
        file.write(json.dumps({"messages": [ASK, called]}) + "\n")
    command = ["model", "sft", str(chats), str(target)]
    done = CliRunner().invoke(app, [*command, "--tuning", tuning, "--epochs", "6", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["chats"], result["chats_left_out"], result["steps"]) == (60, 1, 23)
    assert "left out: 6 of 366 calls (6 untrainable)" in caplog.text
    assert result["last_loss"] < result["first_loss"] / 2
    model, tokenizer = load_policy(str(target))
    prompt = render_prompt(tokenizer, [ASK])
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(ids[0, len(prompt) :]).startswith("HOLD<|im_end|>")
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1 and "name a new directory" in str(again.exception)


def test_a_model_may_have_no_bound_and_calls_may_be_of_another_one(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=259, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    own = Call(step=0, messages=(), response="", prompt_token_ids=(1,), completion_token_ids=(2, 3))
    other = structs.replace(own, completion_token_ids=(99_999,))
    row = TrainingRow(
        trajectory_id="a", agent_id="a", scenario_id="s", score=0.0, calls=(own, other)
    )
    (step,) = fine_tune(tmp_path / "base", [row], tmp_path / "t", tuning="full", batch_size=1)
    assert step.tokens == 2


async def test_fewer_learning_rates_than_batches_are_an_error_and_no_hanging_thread(
    tmp_path: Path,
) -> None:
    base = save_tiny_policy(tmp_path / "base", seed=0)
    call = Call(step=0, messages=(), response="", prompt_token_ids=(5,), completion_token_ids=(6,))
    row = TrainingRow(trajectory_id="a", agent_id="a", scenario_id="s", score=0.0, calls=(call,))
    rates = iter([1e-4])
    with pytest.raises(TrainingError, match="1 learning rates for 3 batches of 1 chats"):
        async with asyncio.timeout(60):
            await asyncio.to_thread(
                fine_tune, base, [row] * 3, tmp_path / "t", tuning="full", batch_size=1,
                learning_rates=rates,
            )  # fmt: skip
    assert not (tmp_path / "t").exists()


def test_a_steps_loss_is_the_mean_over_the_replies_tokens_at_temperature_one(
    tmp_path: Path,
) -> None:
    """Of calls that share a prompt, and were sampled at another temperature."""
    base = save_tiny_policy(tmp_path / "base", seed=0)
    prompt = (5, 6, 7, 8)
    replies = [(9, 10), (9, 11, 12), (13,)]
    calls = tuple(
        Call(
            step=number,
            messages=(),
            response="",
            prompt_token_ids=prompt,
            completion_token_ids=reply,
            temperature=0.5,
        )
        for number, reply in enumerate(replies)
    )
    row = TrainingRow(trajectory_id="a", agent_id="a", scenario_id="s", score=0.0, calls=calls)
    (step,) = fine_tune(base, [row], tmp_path / "t", tuning="full", batch_size=1)
    model, _ = load_policy(base)
    total = torch.zeros(())
    for reply in replies:
        logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(reply), reduction="sum")
    assert step.tokens == 6 and step.loss == pytest.approx(total.item() / 6, rel=1e-5)
    (total / 6).backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_a_step_keeps_the_keys_of_one_shared_text_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of three texts of 100 tokens, in portions of 32. Each has two replies."""
    made, alive = list[weakref.ref[tree_forward.KeyValueCache]](), list[int]()

    class Cache(tree_forward.KeyValueCache):
        def __init__(self) -> None:
            super().__init__()
            alive.append(sum(one() is not None for one in made))
            made.append(weakref.ref(self))

    monkeypatch.setattr(tree_forward, "KeyValueCache", Cache)
    monkeypatch.setattr(forward, "portion_tokens", lambda *_: 32)
    calls = tuple(
        Call(
            step=0,
            messages=(),
            response="",
            prompt_token_ids=(first,) * 100,
            completion_token_ids=(reply,) * 20,
        )
        for first in (5, 6, 7)
        for reply in (8, 9)
    )
    row = TrainingRow(trajectory_id="a", agent_id="a", scenario_id="s", score=0.0, calls=calls)
    base = save_tiny_policy(tmp_path / "base", seed=0)
    fine_tune(base, [row], tmp_path / "t", tuning="full", batch_size=1)
    assert len(alive) > 9
    assert max(alive) < len(alive) / 2


def test_a_step_is_repeated_where_memory_runs_out_and_the_portion_that_fits_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the first attempt does not count."""
    calls = tuple(
        Call(
            step=0,
            messages=(),
            response="",
            prompt_token_ids=(5, 6),
            completion_token_ids=(reply,) * 4,
        )
        for reply in (8, 9)
    )
    row = TrainingRow(trajectory_id="a", agent_id="a", scenario_id="s", score=0.0, calls=calls)
    base = save_tiny_policy(tmp_path / "base", seed=0)
    whole = fine_tune(base, [row, row], tmp_path / "one", tuning="full", batch_size=1)
    accumulate, lacks = forward.PolicyForward.accumulate, [True]

    def lacking(self: Any, tree: Any, loss: Any) -> None:
        accumulate(self, tree, loss)
        if lacks:
            lacks.pop()
            raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(forward.PolicyForward, "accumulate", lacking)
    found = fine_tune(base, [row, row], tmp_path / "two", tuning="full", batch_size=1)
    for one, other in zip(whole, found, strict=True):
        assert (one.loss, one.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-5)
    kept = load_trainable(tmp_path / "two", "full", 0.0).optimizer.param_groups
    assert "portion_that_fits" in kept[0]

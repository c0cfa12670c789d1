"""A window's update on disk, full and LoRA, with exact and with retokenized calls."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as with_changes
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.llm_calls import Message
from babylon.core.trajectories import Call, TrainingRow
from babylon.policies.load import load_policy
from babylon.training.anchor import in_force, load_anchor
from babylon.training.damaged import damage_logged
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.train_report import TrainReport
from babylon.training.trainable import Tuning, load_trainable
from babylon.training.update import scored_trajectories, update_checkpoint
from tests.tiny_policy import plain_logprobs, tiny_model, tiny_tokenizer

MESSAGES = (Message(role="system", content="Trade."), Message(role="user", content="m1 0.50"))
CONFIG = TrainerConfig(
    iterations=2, learning_rate=1e-3, warmup_steps=0, stop_kl=10.0, stop_clip_fraction=1.0
)


def call(response: str, **changes: object) -> Call:
    return Call(**{"step": 0, "messages": MESSAGES, "response": response, **changes})  # type: ignore[arg-type]


def rows(score: float = 1.0) -> list[TrainingRow]:
    return [
        TrainingRow(
            trajectory_id=name, agent_id=name, scenario_id="s", score=value, calls=(call(name),)
        )
        for name, value in (("buy", score), ("hold", 0.0))
    ]


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
def test_an_update_is_saved_and_differs(parent: Path, tmp_path: Path, tuning: Tuning) -> None:
    report = update(parent, tmp_path / "v1", tuning)
    assert report.calls_without_logprobs == report.calls == 2
    assert report.kl_after > 0
    assert not torch.equal(logits(tmp_path / "v1"), logits(parent))


def test_only_what_moved_the_policy_counts_as_trained(parent: Path, tmp_path: Path) -> None:
    tied = [
        with_changes(row, trajectory_id=f"tied-{row.agent_id}", scenario_id="tied", score=1.0)
        for row in rows()
    ]
    greedy = with_changes(rows()[0], trajectory_id="greedy", calls=(call("buy", temperature=0.0),))
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
    carried = load_trainable(tmp_path / "v1", "full", 1e-5).optimizer
    assert carried.state and carried.param_groups[0]["lr"] == 1e-5
    assert not load_trainable(tmp_path / "v1", "lora", 1e-3).optimizer.state  # other parameters


def test_the_optimiser_starts_anew_for_other_parameters_of_the_same_shapes(
    parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    update(parent, tmp_path / "v1", "full")
    path = tmp_path / "v1" / "optimizer.pt"
    saved = torch.load(path, weights_only=True)
    saved["names"][0] += "_of_another_model"
    torch.save(saved, path)
    with caplog.at_level("INFO"):
        assert not load_trainable(tmp_path / "v1", "full", 1e-3).optimizer.state
    assert "the optimiser starts over" in caplog.text


def test_warm_up_is_not_repeated_in_the_next_window(parent: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, warmup_steps=3, learning_rate=1e-5)
    first = update(parent, tmp_path / "v1", "full", config)
    second = update(tmp_path / "v1", tmp_path / "v2", "full", config)
    third = update(tmp_path / "v2", tmp_path / "v3", "full", config)
    rates = [report.learning_rate for report in (first, second, third)]
    assert rates == pytest.approx([1e-5 * 2 / 4, 1e-5, 1e-5])


def test_an_update_far_below_the_precision_of_bf16_is_kept(tmp_path: Path) -> None:
    """A learning rate of 1e-6 moves weights of 0.2 by a fraction of bf16's step of 1e-3."""
    model, coarse = tiny_model(0).to(torch.bfloat16), tmp_path / "bf16"
    model.save_pretrained(coarse)
    tiny_tokenizer().save_pretrained(coarse)
    before = {name: p.float() for name, p in model.state_dict().items()}
    update(coarse, tmp_path / "v1", "full", replace(CONFIG, learning_rate=1e-6))
    after = load_file(tmp_path / "v1" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    gate = "model.layers.0.mlp.gate_proj.weight"
    rounded = after[gate].bfloat16().float()
    assert (rounded != before[gate]).float().mean() < 0.05  # bf16 keeps only the tiniest weights'
    assert (after[gate] != before[gate]).float().mean() > 0.9


def test_a_window_without_signal_writes_nothing(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(WindowNotReadyError, match="differing scores"):
        update_checkpoint(parent, rows(score=0.0), tmp_path / "v1", tuning="full", config=CONFIG)
    assert not list(tmp_path.iterdir())


def test_a_diverging_update_writes_nothing(parent: Path, tmp_path: Path) -> None:
    wild = TrainerConfig(
        iterations=3,
        learning_rate=1e30,
        warmup_steps=0,
        stop_kl=1e30,
        stop_clip_fraction=2.0,
        grad_clip=1e30,
    )
    with pytest.raises(TrainingError, match="lower the learning rate"):
        update_checkpoint(
            parent,
            rows(),
            tmp_path / "v1",
            tuning="full",
            config=wild,
            progress_directory=tmp_path / "progress",
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_kl_penalty_pulls_to_an_anchor_that_follows_slowly(
    tuning: Tuning, parent: Path, tmp_path: Path
) -> None:
    """The first anchor is the parent. A tenth of an update later it is still near it."""
    config = TrainerConfig(iterations=2, learning_rate=1e-3, warmup_steps=0, kl_penalty=0.1)
    assert update(parent, tmp_path / "v1", tuning, config).kl_reference > 0
    before = load_trainable(parent, tuning, 1e-3)
    after = load_trainable(tmp_path / "v1", tuning, 1e-3)
    anchor = load_anchor(after, tmp_path / "v1")
    for name, weight in after.tuned.items():
        start = before.tuned[name].detach()
        torch.testing.assert_close(anchor[name], start + 0.1 * (weight.detach() - start))
    with in_force(after, anchor):
        for name, weight in after.tuned.items():
            assert torch.equal(weight, anchor[name])
    assert all(
        torch.equal(weight, load_trainable(tmp_path / "v1", tuning, 1e-3).tuned[name])
        for name, weight in after.tuned.items()
    )


def test_a_model_without_routers_is_told_the_setting_that_it_cannot_have(
    parent: Path, tmp_path: Path
) -> None:
    config = TrainerConfig(router_loss=0.1)
    with pytest.raises(TrainingError, match=r"ROUTER_AUX_LOSS=0.1, but .* set it to 0"):
        update(parent, tmp_path / "v1", "lora", config)


def test_a_damaged_anchor_begins_with_the_parent(
    parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TrainerConfig(iterations=1, learning_rate=1e-3, warmup_steps=0, kl_penalty=0.1)
    update(parent, tmp_path / "v1", "lora", config)
    path = tmp_path / "v1" / "anchor.pt"
    path.write_bytes(path.read_bytes()[:500])
    trainable = load_trainable(tmp_path / "v1", "lora", 1e-3)
    anchor = load_anchor(trainable, tmp_path / "v1")
    assert "the anchor begins with the parent" in caplog.text
    assert all(torch.equal(weight, anchor[name]) for name, weight in trainable.tuned.items())


@pytest.mark.parametrize(
    "passing",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        OSError(errno.EIO, "Input/output error"),
    ],
)
def test_too_little_memory_and_a_failing_disk_are_no_damage(
    tmp_path: Path, passing: Exception
) -> None:
    with pytest.raises(type(passing)), damage_logged(tmp_path, "it would start over"):
        raise passing


def test_the_optimiser_of_a_rejected_update_goes_on(parent: Path, tmp_path: Path) -> None:
    update(parent, tmp_path / "rejected", "full", TrainerConfig(iterations=1))
    carried = load_trainable(parent, "full", 1e-3, optimizer_of=tmp_path / "rejected")
    assert carried.optimizer.state and not load_trainable(parent, "full", 1e-3).optimizer.state
    for name, weight in load_trainable(parent, "full", 1e-3).tuned.items():
        assert torch.equal(weight, carried.tuned[name])


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
        ({"temperature": 1e-6}, 512, "greedy"),
        ({}, 10, "too_long"),
        ({"prompt_token_ids": (1,), "completion_token_ids": (), "logprobs": ()}, 512, "empty"),
        ({"untrainable": "interrupted"}, 512, "untrainable"),
        ({"untrainable": "top_p 0.9: not sampled from all"}, 512, "truncated"),
        ({"untrainable": "the distribution was bent by top_k"}, 512, "truncated"),
        ({"top_p": 0.9}, 512, "truncated"),
        (
            {
                "prompt_token_ids": (5,),
                "completion_token_ids": (7, 8),
                "logprobs": (-0.1, -9999.0),
            },
            512,
            "untrainable",
        ),
    ],
)
def test_bad_calls_are_counted(changes: dict[str, object], context: int, reason: str) -> None:
    calls, excluded = tokens(changes, context)
    assert not calls
    assert excluded == dict.fromkeys(excluded, 0) | {reason: 1}


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_call_that_is_all_but_greedy_does_not_touch_the_others(
    temperature: float, parent: Path, tmp_path: Path
) -> None:
    """Its gradient would be a million times theirs, or not finite."""
    cold = with_changes(
        rows()[0], trajectory_id="cold", calls=(call("sell", temperature=temperature),)
    )
    made = [
        update_checkpoint(parent, window, tmp_path / str(number), tuning="lora", config=CONFIG)
        for number, window in enumerate([rows(), [*rows(), cold]])
    ]
    norms = [one.report.grad_norm for one in made]
    assert norms[0] == norms[1] and made[1].excluded.greedy == 1


def test_a_logprob_that_stands_for_minus_infinity_does_not_rule_out_the_others(
    parent: Path, tmp_path: Path
) -> None:
    """One such token among a thousand would be a mismatch of ten nats a token."""
    usual = logged(parent, 1, logprobs=True)
    first = usual[0].calls[0]
    assert first.logprobs is not None
    cut = with_changes(first, logprobs=(-9999.0, *first.logprobs[1:]))
    window = [*usual, with_changes(usual[0], trajectory_id="cut", calls=(cut,))]
    made = update_checkpoint(
        parent, window, tmp_path / "v2", tuning="full", config=CONFIG, staleness={1: 0}
    )
    assert isinstance(made.report, TrainReport) and made.report.logprob_mismatch < 0.1


@pytest.mark.parametrize("role", [5, ["user"], {}])
def test_a_role_that_is_no_text_costs_only_its_call(role: object) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    )
    odd = call("hold", messages=({"role": role, "content": "a"},))
    row = TrainingRow(
        trajectory_id="t", agent_id="a", scenario_id="s", score=1.0, calls=(odd, call("hold"))
    )
    (left,), excluded = scored_trajectories(tokenizer, [row], 512)
    assert (len(left.calls), excluded.untrainable) == (1, 1)


def test_a_call_that_the_chat_template_refuses_costs_only_itself() -> None:
    tokenizer = tiny_tokenizer()
    refusal = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    tokenizer.chat_template = refusal + tokenizer.chat_template
    plain = call("buy", messages=MESSAGES[1:])
    row = with_changes(rows()[0], calls=(plain, call("hold")))
    [trained], excluded = scored_trajectories(tokenizer, [row], 512)
    assert len(trained.calls) == 1 and excluded.untrainable == 1


def logged(parent: Path, version: int, *, logprobs: bool) -> list[TrainingRow]:
    """Two calls that the policy at ``parent`` made, with its logprobs or without."""
    model, tokenizer = load_policy(parent)
    made = []
    for name, score in (("buy", 1.0), ("hold", 0.0)):
        completion = tuple(tokenizer.encode(name))
        exact = plain_logprobs(model, (5, 6, 7), completion).tolist()
        changes: dict[str, object] = {
            "prompt_token_ids": (5, 6, 7),
            "completion_token_ids": completion,
            "logprobs": tuple(exact) if logprobs else None,
            "policy_version": version,
        }
        made.append(
            TrainingRow(
                trajectory_id=name,
                agent_id=name,
                scenario_id="s",
                score=score,
                calls=(call(name, **changes),),
            )
        )
    return made


def test_calls_without_logprobs_are_counted(parent: Path, tmp_path: Path) -> None:
    unlogged = logged(parent, 3, logprobs=False)
    made = update_checkpoint(
        parent, unlogged, tmp_path / "v1", tuning="full", config=CONFIG, staleness={3: 1}
    )
    assert made.report.calls_without_logprobs == 2
    with pytest.raises(WindowNotReadyError, match="MAX_MISSING_LOGPROBS"):
        update_checkpoint(
            parent,
            unlogged,
            tmp_path / "v2",
            tuning="full",
            config=replace(CONFIG, max_missing_logprobs=0.5),
            staleness={3: 1},
        )


def test_a_window_of_stale_calls_alone_is_refused(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(WindowNotReadyError, match=r"version 3 \(2 updates old"):
        update_checkpoint(
            parent,
            logged(parent, 3, logprobs=True),
            tmp_path / "v1",
            tuning="full",
            config=CONFIG,
            staleness={3: 2},
        )

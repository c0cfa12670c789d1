"""Adapters, precisions and optimisers: each has the gradient that its paper says."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_changes
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from babylon.core.errors import ModelError
from babylon.policies.load import load_policy
from babylon.training.grpo.forward import FittingForward, PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.trainable import (
    Trainable,
    TuningOptions,
    load_trainable,
    new_adapter,
    save_checkpoint,
)
from babylon.training.update import update_checkpoint
from tests.tiny_policy import tiny_tokenizer
from tests.unit.training.grpo.architectures import architecture
from tests.unit.training.grpo.trees import call
from tests.unit.training.test_update import CONFIG, rows

CALLS = [call([5, 6, 7, 8], [9, 10, 11]), call([5, 6, 7, 12], [13, 14])]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mixture")
    architecture("qwen3_moe", vocab_size=259).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


def gradients(made: Trainable) -> dict[str, Tensor]:
    """Of the calls' summed logprobs, by the name of the tuned tensor."""
    fitting = FittingForward(made.model, None)
    fitting.run(lambda f: f.accumulate(compile_tree(CALLS), lambda _, v: v.logprobs.sum()))
    return {name: p.grad.clone() for name, p in made.tuned.items() if p.grad is not None}


def of(found: dict[str, Tensor], *parts: str) -> Tensor:
    [value] = [v for name, v in found.items() if all(part in name for part in parts)]
    return value


def lora(parent: Path, **options: Any) -> Trainable:
    return load_trainable(parent, "lora", 1e-3, options=TuningOptions(**options))


def test_an_adapters_gradient_is_the_weights_gradient_in_its_own_subspace(parent: Path) -> None:
    """At the start B = 0, so dL/dB = scale * dL/dW A^T, with scale alpha / r (arXiv 2106.09685).

    rsLoRA divides by the root of r (arXiv 2312.03732). DoRA has LoRA's gradient there, because its
    norm has none, and dL/dm = <dL/dW, W> / |W| a row (arXiv 2402.09353, section 4.3).
    """
    at = "layers.1.mlp.up_proj"
    full = of(gradients(load_trainable(parent, "full", 1e-3)), at)
    weight = load_policy(parent)[0].get_parameter(f"model.{at}.weight")
    for variant, scale in (("lora", 12 / 4), ("rslora", 12 / 2), ("dora", 12 / 4)):
        made = lora(parent, rank=4, alpha=12, adapter=variant)
        [down] = [p for name, p in made.tuned.items() if at in name and "lora_A" in name]
        assert down.shape[0] == 4
        found = gradients(made)
        expected = scale * full @ down.detach().T
        torch.testing.assert_close(of(found, at, "lora_B"), expected, rtol=1e-3, atol=1e-4)
        if variant == "dora":
            magnitude = (full * weight).sum(1) / weight.norm(dim=1)
            ours = of(found, at, "magnitude").flatten()
            torch.testing.assert_close(ours, magnitude, rtol=1e-3, atol=1e-4)


def test_a_new_adapter_is_on_the_experts_of_a_mixture(mixture: Path) -> None:
    """Expert e has dL/dB_e = scale * dL/dW_e A_e^T. Its rank is 4 over two active experts."""
    at = "layers.1.mlp.experts"
    made = lora(mixture, rank=4, alpha=12)
    found = gradients(made)
    full = of(gradients(load_trainable(mixture, "full", 1e-3)), at, "gate_up_proj")  # [E, out, in]
    experts, rank = 4, 2
    # PEFT nests a module's wrappers and names only their order: the shapes tell them apart
    [name] = [n for n, p in made.tuned.items() if at in n and "lora_A" in n and p.shape[1] == 32]
    down = made.tuned[name].detach().reshape(experts, rank, -1)  # [E, r, in]
    expected = 3.0 * torch.einsum("eoi,eri->ore", full, down).flatten(1)
    ours = found[name.replace("lora_A", "lora_B")]
    assert ours.shape == (full.shape[1], rank * experts)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


def test_a_mixtures_update_trains_its_experts_and_the_next_one_continues(
    mixture: Path, tmp_path: Path
) -> None:
    first = tmp_path / "checkpoints" / "v1"
    update_checkpoint(mixture, rows(), first, tuning="lora", config=CONFIG)
    before, after = (load_policy(path)[0].state_dict() for path in (mixture, first))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split("mlp.")[-1] for name in moved if "experts" in name} == {
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    again = load_trainable(first, "lora", 1e-3)
    merged = PolicyForward(load_policy(first)[0]).logprobs(compile_tree(CALLS)).logprobs
    adapted = PolicyForward(again.model).logprobs(compile_tree(CALLS)).logprobs
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)
    assert again.optimizer.state  # the moments belong to the same tensors


def test_dora_refuses_experts(mixture: Path) -> None:
    with pytest.raises(ModelError, match=r"LORA_VARIANT=dora has no form for experts"):
        lora(mixture, adapter="dora")


def test_experts_of_an_unknown_form_are_not_left_out_in_silence() -> None:
    config = AutoConfig.for_model("jetmoe", hidden_size=32, num_hidden_layers=1, vocab_size=64)
    with torch.device("meta"):
        jetmoe = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=r"leave out .*input_linear.* \(jetmoe keeps"):
        new_adapter(jetmoe, "all", TuningOptions())


PRECISIONS: list[tuple[Any, float, float]] = [("bf16", 0.05, 0.99), ("nf4", 0.6, 0.6)]


@pytest.mark.parametrize(("precision", "nats", "cosine"), PRECISIONS)
def test_a_frozen_base_in_few_bits_keeps_the_adapters_gradient_near(
    parent: Path, precision: Any, nats: float, cosine: float
) -> None:
    if precision == "nf4" and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    exact, rough = lora(parent), lora(parent, base_precision=precision)
    frozen = {p.dtype for p in rough.model.parameters() if not p.requires_grad}
    assert {p.dtype for p in rough.tuned.values()} == {torch.float32}
    assert frozen - {torch.float32} and frozen != {torch.float32}
    tree = compile_tree(CALLS)
    one, other = (
        FittingForward(made.model, None).run(lambda f: f.logprobs(tree)).logprobs
        for made in (exact, rough)
    )
    assert 0 < float((one - other).abs().mean()) < nats
    ours, reference = (
        torch.cat([g.flatten() for n, g in sorted(gradients(made).items()) if "lora_B" in n])
        for made in (rough, exact)
    )
    assert float(torch.cosine_similarity(ours, reference, dim=0)) > cosine


def test_the_portion_that_fitted_is_remembered_with_the_checkpoint(
    parent: Path, tmp_path: Path
) -> None:
    made = lora(parent)
    fitting = FittingForward(made.model, 400)
    fitting.restore(2)
    fitting.remember(made.optimizer.param_groups)
    gradients(made)
    made.optimizer.step()
    save_checkpoint(made, tmp_path / "v1")
    groups = load_trainable(tmp_path / "v1", "lora", 1e-3).optimizer.param_groups
    again = FittingForward(made.model, None, groups)
    assert again.forward.max_tokens == 100 and again.checkpointing
    assert FittingForward(made.model, 50, groups).forward.max_tokens == 50


def broken(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def without_state(path: Path) -> None:
    torch.save({"names": []}, path)


def no_name(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"exp_avg", b"exp_\xff\xff\xff"))


def not_finite(path: Path, moment: str) -> None:
    saved = torch.load(path, weights_only=True)
    saved["state"]["state"][0][moment][0, 0] = torch.nan
    torch.save(saved, path)


HARMS = [
    broken,
    no_name,
    without_state,
    partial(not_finite, moment="exp_avg"),
    partial(not_finite, moment="exp_avg_sq"),
]


@pytest.mark.parametrize("harm", HARMS)
def test_a_corrupt_optimiser_starts_over(
    parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    made = lora(parent)
    gradients(made)
    made.optimizer.step()
    save_checkpoint(made, tmp_path / "v1")
    assert load_trainable(tmp_path / "v1", "lora", 1e-3).optimizer.state
    harm(tmp_path / "v1" / "optimizer.pt")
    with caplog.at_level(logging.INFO):
        assert not load_trainable(tmp_path / "v1", "lora", 1e-3).optimizer.state
    assert "the optimiser starts over" in caplog.text


class EightBits(torch.optim.Optimizer):
    """Has its state in bitsandbytes' form."""

    inside = False  # a dictionary

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            moments = {f"state{i}": torch.ones_like(parameter, dtype=torch.uint8) for i in (1, 2)}
            more = {"__bnb_optimizer_quant_state__": moments} if self.inside else moments
            self.state[parameter] = {"step": 1, **more}


@pytest.mark.parametrize("inside", [False, True])
def test_moments_of_eight_bits_are_carried_over_to_their_own_optimiser(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    monkeypatch.setattr(EightBits, "inside", inside)
    library = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=EightBits))
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    options = TuningOptions(optimizer="adamw8bit")
    made = lora(parent, optimizer="adamw8bit")
    made.optimizer.step()
    save_checkpoint(made, tmp_path / "v1")
    assert load_trainable(tmp_path / "v1", "lora", 1e-3, options=options).optimizer.state
    assert not load_trainable(tmp_path / "v1", "lora", 1e-3).optimizer.state


def test_a_parent_that_is_not_finite_is_refused_by_name(parent: Path, tmp_path: Path) -> None:
    model, tokenizer = load_policy(parent)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\..* is not finite"):
        load_trainable(tmp_path, "lora", 1e-3)


def test_a_call_with_a_token_of_another_model_is_left_out(parent: Path, tmp_path: Path) -> None:
    given = rows()
    foreign = with_changes(given[0].calls[0], prompt_token_ids=(5, 259), completion_token_ids=(6,))
    given[0] = with_changes(given[0], calls=(*given[0].calls, foreign))
    made = update_checkpoint(parent, given, tmp_path / "v1", tuning="lora", config=CONFIG)
    assert made.excluded.unknown_tokens == 1 and made.report.calls == 2


def test_an_update_goes_on_when_the_disk_of_its_journal_is_full(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("babylon.training.progress_file.save_tensors", full)
    progress = tmp_path / "progress"
    config = replace(CONFIG, iterations=3)
    update_checkpoint(
        parent,
        rows(),
        tmp_path / "v1",
        tuning="lora",
        config=config,
        progress_directory=progress,
    )
    assert (tmp_path / "v1" / "optimizer.pt").exists()
    assert "the progress is not saved" in caplog.text and "No space left" in caplog.text


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_moments_of_eight_bits_move_the_weights_as_those_of_32_do(parent: Path) -> None:
    moves = []
    for optimizer in ("adamw", "adamw8bit"):
        made = load_trainable(parent, "full", 1e-3, options=TuningOptions(optimizer=optimizer))  # type: ignore[arg-type]
        before = {name: p.detach().clone() for name, p in made.tuned.items()}
        for _ in range(3):
            made.optimizer.zero_grad()
            gradients(made)
            made.optimizer.step()
        changes = [(p.detach() - before[n]).flatten() for n, p in made.tuned.items()]
        moves.append(torch.cat(changes))
    assert float(torch.cosine_similarity(*moves, dim=0)) > 0.95


def test_an_anchor_holds_an_update_back(parent: Path, tmp_path: Path) -> None:
    """For full fine-tuning too: the first anchor is the parent."""
    distances = []
    for name, penalty in (("free", 0.0), ("held", 30.0)):
        config = replace(CONFIG, iterations=6, kl_penalty=penalty)
        made = update_checkpoint(parent, rows(), tmp_path / name, tuning="full", config=config)
        distances.append(made.report.kl_after)
    assert 0 < distances[1] < 0.7 * distances[0]

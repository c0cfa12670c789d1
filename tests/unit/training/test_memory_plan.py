"""The memory plan against counted weights, saved activations, and the figures of large models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from babylon.cli import app
from babylon.policies.load import quiet_ranks
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.memory_plan import (
    VLLM_SHARE,
    in_portions,
    plan_memory,
    portions_that_fit,
    share_device,
)
from babylon.training.trainable import TuningOptions, new_adapter
from benchmarks.trainer.models import GPU_MODELS
from tests.tiny_policy import tiny_model
from tests.unit.training.grpo.trees import call

GIB = 2**30
BF16 = TuningOptions(base_precision="bf16")


MIXTURE = AutoConfig.for_model(
    "mixtral",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=6,
)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "falcon", "mamba"])
def test_a_model_that_names_no_widths_has_a_plan(kind: str) -> None:
    """Of feed-forward layers, or of heads. They are trained too, as padded batches."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {} if kind == "mamba" else {"num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, **heads)
    plan = plan_memory(config, tuning="full", layers="all", options=BF16, context=8192, portion=64)
    assert plan.activations > 0 and (plan.keys_and_values > 0) == (kind != "mamba")


@pytest.mark.parametrize(
    "model",
    [tiny_model(0), AutoModelForCausalLM.from_config(MIXTURE)],  # type: ignore[no-untyped-call]
    ids=["dense", "six experts of eight"],
)
def test_a_plan_counts_the_weights_and_comes_near_the_saved_activations(model: Any) -> None:
    portion = 120
    plan = plan_memory(
        model.config, tuning="full", layers="all", options=BF16, context=100, portion=portion
    )
    count = sum(p.numel() for p in model.parameters())
    assert (plan.weights, plan.gradients, plan.moments) == (4 * count, 4 * count, 8 * count)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tree = compile_tree([call(list(range(portion)), [5])])

    def loss(_: Any, values: Any) -> torch.Tensor:
        kept = sum(size for at, size in saved.items() if at not in own)
        assert 0.5 < plan.activations / kept < 2
        return values.logprobs.sum()  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        PolicyForward(model, max_tokens=portion).accumulate(tree, loss)


@pytest.mark.parametrize(
    ("config", "tuning", "portion", "measured"),
    [
        (GPU_MODELS["qwen2.5-0.5b"], "full", 9270, 22.0),
        (GPU_MODELS["qwen2.5-7b"], "lora", 9270, 77.2),
    ],
)
def test_a_plan_comes_near_the_peak_that_was_measured_on_an_h100(
    config: Any, tuning: Any, portion: int, measured: float
) -> None:
    """In GiB, without the moments of the 0.5B model, whose optimiser took no step."""
    plan = plan_memory(
        config, tuning=tuning, layers="all", options=BF16, context=4256, portion=portion
    )
    moments = plan.moments if tuning == "full" else 0
    assert 0.9 < (plan.total - moments) / GIB / measured < 1.1


def test_a_plan_counts_the_copies_that_adapted_experts_keep() -> None:
    plan = plan_memory(
        MIXTURE, tuning="lora", layers="all", options=TuningOptions(), context=8, portion=8
    )
    model: Any = AutoModelForCausalLM.from_config(MIXTURE)  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    with quiet_ranks():
        adapted = get_peft_model(model, new_adapter(model, "all", TuningOptions()))
    own = {p.untyped_storage().data_ptr() for p in adapted.parameters()}
    copies: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes() >= 4 * 8 * 64 * 128:  # of all experts
            copies[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapted(torch.arange(8)[None])
    assert sum(copies.values()) == MIXTURE.num_hidden_layers * plan.expert_copies
    kept, recomputed = (
        in_portions(plan, MIXTURE, precision="fp32", context=8, portion=8, recompute=recompute)
        for recompute in (False, True)
    )
    layers_more = MIXTURE.num_hidden_layers - 1
    assert kept.activations - recomputed.activations > layers_more * plan.expert_copies


def test_lora_of_a_32b_model_fits_one_h200_with_recomputed_activations() -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    plan = plan_memory(
        config, tuning="lora", layers="all", options=BF16, context=32_768, recompute=True
    )
    assert 60 * GIB < plan.weights < 70 * GIB  # 32.8 billion weights, 0.8 of them in the head
    assert 85 * GIB < plan.total < 95 * GIB
    fits = portions_that_fit(plan, config, precision="bf16", context=32_768, memory=139 * GIB)
    assert fits == {"kept": 1024, "recomputed": 16_384}
    none = portions_that_fit(plan, config, precision="bf16", context=32_768, memory=60 * GIB)
    assert none == {"kept": None, "recomputed": None}
    assert (
        in_portions(plan, config, precision="bf16", context=0, portion=64, recompute=True).total
        < plan.total
    )


def test_eight_ranks_tune_all_weights_of_an_8b_model_where_one_device_does_not_hold_them() -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    alone, divided = (
        plan_memory(
            config,
            tuning="full",
            layers="all",
            options=TuningOptions(),
            context=8192,
            recompute=True,
            ranks=ranks,
        )
        for ranks in (1, 8)
    )
    assert alone.total > 120 * GIB
    assert divided.moments == alone.moments // 8
    head_and_embeddings = 4 * 2 * 151_936 * 4096
    assert divided.weights - alone.weights // 8 > 2 * head_and_embeddings
    assert divided.total < 42 * GIB


def test_an_engine_leaves_the_rest_of_its_device_to_trainer_and_checks() -> None:
    config = tiny_model(0).config
    model = 4 * sum(p.numel() for p in tiny_model(0).parameters())
    given: dict[str, Any] = {"config": config, "memory": 100 * GIB}
    args = "--max-loras 4 --gpu-memory-utilization 0.4"
    lora = share_device(**given, engine="vllm", vllm_args=args, tuning="lora")
    assert (lora.engine, lora.beside_engine) == (40 * GIB, 60 * GIB)
    assert model < lora.checks < lora.match_without_engine + 2**26
    both = share_device(**given, engine="vllm", vllm_args=args, tuning="full")
    assert both.engine == 80 * GIB
    turns = share_device(**given, engine="vllm", vllm_args=args, tuning="full", turns=True)
    assert turns == lora
    usual = share_device(**given, engine="vllm", vllm_args="", tuning="lora")
    assert usual.engine == round(VLLM_SHARE * 100 * GIB)
    assert share_device(**given, engine="remote", vllm_args="", tuning="full").engine == 0
    own = share_device(**given, engine="embedded", vllm_args="", tuning="lora")
    assert own.engine == model


SIZES: dict[str, dict[str, Any]] = {
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "32b": {
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


@pytest.mark.parametrize(
    ("size", "settings", "portion", "fits"),
    [
        ("7b", {"TUNING": "lora", "VLLM_ARGS": "--gpu-memory-utilization 0.4"}, 16_384, True),
        ("7b", {"TUNING": "lora"}, None, False),  # vLLM takes nine tenths
        ("7b", {"TUNING": "full", "VLLM_ARGS": "--gpu-memory-utilization 0.15"}, None, False),
        (
            "7b",
            {
                "TUNING": "full",
                "OPTIMIZER": "adamw8bit",
                "VLLM_ARGS": "--gpu-memory-utilization 0.15",
            },
            16_384,
            True,
        ),
        ("32b", {"TUNING": "lora", "VLLM_ARGS": "--gpu-memory-utilization 0.4"}, 8192, True),
        # the checks read a model as the trainer has it, so in fp32 neither of the two fits
        (
            "32b",
            {
                "TUNING": "lora",
                "VLLM_ARGS": "--gpu-memory-utilization 0.4",
                "BASE_PRECISION": "fp32",
            },
            None,
            False,
        ),
    ],
)
def test_what_fits_one_h200_beside_vllm(
    size: str,
    settings: dict[str, str],
    portion: int | None,
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """7B and 32B on 139 GiB, calls of 8,192 tokens, largest portion with recomputed activations."""
    kind = AutoConfig.for_model("qwen3", tie_word_embeddings=False, **SIZES[size])
    kind.save_pretrained(tmp_path)
    given = {"ENGINE": "vllm", "VLLM_PYTHON": "python", "BASE_PRECISION": "bf16"}
    for name, value in {**given, "BABYLON_HOME": str(tmp_path / "home"), **settings}.items():
        monkeypatch.setenv(name, value)
    command = ["model", "memory", str(tmp_path), "--device-gib", "139", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == (0 if fits else 1), done.output
    plan = json.loads(done.stdout)
    assert plan["portion_beside_engine_recomputed"] == portion
    assert plan["fits_beside_engine"] is fits


def test_a_model_whose_text_sizes_lie_in_a_part_of_its_configuration_is_planned() -> None:
    """transformers loads the text model of a Qwen3.5, which has eyes."""
    config = AutoConfig.for_model("qwen3_5")
    plan = plan_memory(config, tuning="lora", layers="all", options=BF16, context=9000)
    text = config.get_text_config()
    assert plan == plan_memory(text, tuning="lora", layers="all", options=BF16, context=9000)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["model", "memory", str(tmp_path / "none")])
    assert done.exit_code == 1 and str(done.exception) == (
        f"{tmp_path / 'none'} is not a directory: name one with a model, or a model's id"
    )

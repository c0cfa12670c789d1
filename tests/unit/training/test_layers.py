"""The tensors that move, for every choice of layers and tuning."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from babylon.core.errors import ModelError
from babylon.policies.load import load_policy
from babylon.training.trainable import (
    TransferLayers,
    Tuning,
    adapter_targets,
    load_trainable,
    tune_only,
)
from babylon.training.update import update_checkpoint
from tests.unit.training.test_update import CONFIG, rows

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
FFN = {"gate_proj", "up_proj", "down_proj"}


def tune(parent: Path, target: Path, tuning: Tuning, layers: TransferLayers) -> Path:
    update_checkpoint(parent, rows(), target, tuning=tuning, config=CONFIG, transfer_layers=layers)
    return target


def moved(before: Path, after: Path) -> set[str]:
    """Names of the tensors that differ between two policies, adapters merged."""
    old, new = (load_policy(path)[0].state_dict() for path in (before, after))
    return {name for name in old if not torch.equal(old[name], new[name])}


@pytest.mark.parametrize(
    ("tuning", "layers", "leaves"),
    [
        ("full", "attention", ATTENTION | {"q_norm", "k_norm"}),
        ("full", "ffn", FFN),
        (
            "full",
            "all",
            ATTENTION
            | FFN
            | {"q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm"}
            | {"embed_tokens", "lm_head"},
        ),
        ("lora", "attention", ATTENTION),
        ("lora", "ffn", FFN),
        ("lora", "all", ATTENTION | FFN),
    ],
)
def test_only_the_chosen_layers_move(
    parent: Path, tmp_path: Path, tuning: Tuning, layers: TransferLayers, leaves: set[str]
) -> None:
    after = tune(parent, tmp_path / "v1", tuning, layers)
    assert {name.split(".")[-2] for name in moved(parent, after)} == leaves


def test_an_adapter_keeps_its_layers_and_trains_others(parent: Path, tmp_path: Path) -> None:
    first = tune(parent, tmp_path / "v1", "lora", "attention")
    second = tune(first, tmp_path / "v2", "lora", "ffn")
    assert {name.split(".")[-2] for name in moved(first, second)} == FFN
    assert {name.split(".")[-2] for name in moved(parent, second)} == FFN | ATTENTION
    before, after = (
        {
            name: tensor
            for name, tensor in load_file(path / "adapter_model.safetensors").items()
            if "self_attn" in name
        }
        for path in (first, second)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_new_layers_of_an_adapter_change_nothing_at_first(parent: Path, tmp_path: Path) -> None:
    first = tune(parent, tmp_path / "v1", "lora", "attention")
    widened = load_trainable(first, "lora", 1e-3, "all").model.eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = load_policy(first)[0](input_ids=ids).logits
        torch.testing.assert_close(widened(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_attention_and_feed_forward_are_told_apart_by_their_place() -> None:
    """GPT-2 calls the last layer of both ``c_proj``."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11))
    assert adapter_targets(model, "attention") == {"attn.c_attn", "attn.c_proj"}
    assert adapter_targets(model, "ffn") == {"mlp.c_fc", "mlp.c_proj"}


def test_a_model_without_such_layers_is_refused() -> None:
    """OPT's feed-forward layers lie in the block itself, under no name of their own."""
    config = OPTConfig(
        num_hidden_layers=1, hidden_size=8, ffn_dim=8, num_attention_heads=2, vocab_size=11
    )
    model = OPTForCausalLM(config)
    for refuse in (adapter_targets, tune_only):
        with pytest.raises(ModelError, match=r"TRANSFER_LAYERS=ffn, but the model \(opt\)"):
            refuse(model, "ffn")


def test_an_adapter_whose_layers_are_a_pattern_is_refused(parent: Path, tmp_path: Path) -> None:
    """Nothing here writes one; an adapter from elsewhere may."""
    adapter = tune(parent, tmp_path / "v1", "lora", "all")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ".*proj"}))
    with pytest.raises(ModelError, match="TUNING=full, which merges it"):
        load_trainable(adapter, "lora", 1e-3)
    assert load_trainable(adapter, "full", 1e-3).tuned

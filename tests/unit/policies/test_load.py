import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3Config, PreTrainedModel

from babylon.core.errors import ModelError
from babylon.policies import load
from babylon.policies.load import load_policy
from babylon.training.memory_plan import plan_memory
from babylon.training.trainable import DEFAULT_OPTIONS
from tests.tiny_policy import save_tiny_policy, tiny_tokenizer

IDS = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_policy(tmp_path / "base", seed=1)


def save_adapter(base: Path, name: str, **options: str) -> Path:
    torch.manual_seed(len(name))
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **options)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(base.parent / name)
    tiny_tokenizer().save_pretrained(base.parent / name)
    return base.parent / name


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    answer: torch.Tensor = model(input_ids=IDS).logits
    return answer


def held(*models: PreTrainedModel) -> int:
    """Different places in memory that hold weights."""
    return len({weight.data_ptr() for model in models for weight in model.parameters()})


@pytest.mark.parametrize("large", [False, True])
def test_frozen_bases_are_shared(base: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    monkeypatch.setattr(load, "_LARGE", 0 if large else 2**40)
    paths = [base, save_adapter(base, "a"), save_adapter(base, "bb")]
    alone = [load_policy(path)[0] for path in paths]
    together = [load_policy(path, frozen=True)[0] for path in paths]
    for one, shared in zip(alone, together, strict=True):
        torch.testing.assert_close(logits(one), logits(shared), atol=1e-5, rtol=0)
    changed = 2 * 2 * (2 if large else 1)  # two adapters on two layers, of two matrices each
    assert held(*together) == held(together[0]) + changed


def test_the_base_goes_with_the_last_of_its_policies(base: Path) -> None:
    policies = [load_policy(save_adapter(base, name), frozen=True)[0] for name in ("a", "bb")]
    shared = weakref.ref(load._base_of[policies[0]])
    assert load._base_of[policies[1]] is shared()
    policies.pop()
    gc.collect()
    assert shared() is not None
    policies.pop()
    gc.collect()
    assert shared() is None


def test_one_who_computes_in_a_way_of_its_own_leaves_the_others_alone(base: Path) -> None:
    one, other = (load_policy(base, frozen=True)[0] for _ in range(2))
    one.config._attn_implementation = "another"
    one.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    assert logits(other).isfinite().all() and other.config._attn_implementation != "another"
    assert held(one, other) == held(other)


def test_a_base_that_was_written_anew_is_another(base: Path) -> None:
    before, _ = load_policy(base, frozen=True)
    save_tiny_policy(base, seed=2)
    after, _ = load_policy(base, frozen=True)
    assert not torch.equal(logits(before), logits(after))


def test_a_policy_that_goes_leaves_nothing_of_its_tensors(base: Path) -> None:
    """safetensors keeps a number of each tensor that it reads from a mapped file."""

    def load_and_drop(times: int) -> int:
        for _ in range(times):
            load_policy(base)
        gc.collect()
        return sys.getallocatedblocks()

    tensors = len(load_policy(base)[0].state_dict())
    before = load_and_drop(10)
    assert load_and_drop(30) - before < 30 * tensors / 2


def test_weights_that_are_not_frozen_are_not_shared(base: Path) -> None:
    frozen, _ = load_policy(base, frozen=True)
    free, _ = load_policy(base)
    expected = logits(frozen)
    with torch.no_grad():
        for weight in free.parameters():
            weight.zero_()
    assert torch.equal(logits(frozen), expected)


def test_an_adapter_with_biases_leaves_the_shared_ones_alone(base: Path) -> None:
    frozen, _ = load_policy(base, frozen=True)
    expected = logits(frozen)
    load_policy(save_adapter(base, "a", bias="all"), frozen=True)
    assert torch.equal(logits(frozen), expected)


def test_adapters_on_a_base_in_16_bits_share_it_and_stay_in_fp32(base: Path) -> None:
    paths = [base, save_adapter(base, "a"), save_adapter(base, "bb")]
    models = [load_policy(path, frozen=True, precision="bf16")[0] for path in paths]
    assert held(*models) == held(models[0]) + 2 * 2 * 2
    for model in models:
        kinds = {(w.dtype, "lora_" in n or "lm_head" in n) for n, w in model.named_parameters()}
        assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    exact, _ = load_policy(base, frozen=True)
    assert {w.dtype for w in exact.parameters()} == {torch.float32}


def test_a_model_that_also_sees_images_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    text = {"vocab_size": 259, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    seen = {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=sizes | text, vision_config=sizes | seen, mm_tokens_per_image=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    tiny_tokenizer().save_pretrained(tmp_path)
    refused = r"Gemma3ForConditionalGeneration has parts for images.*take a model of text alone"
    with pytest.raises(ModelError, match=refused):
        load_policy(tmp_path)
    with pytest.raises(ModelError, match=refused):
        plan_memory(config, tuning="lora", layers="all", options=DEFAULT_OPTIONS, context=100)

"""The prefix tree in the architectures that people train, against the formula."""

import logging
from random import Random
from typing import Any

import pytest
import torch

from babylon.training.grpo.forward import FittingForward, Path, PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.stateful import STATEFUL
from babylon.training.grpo.training_input import CallTokens
from babylon.training.trainable import DEFAULT_OPTIONS, new_adapter
from tests.unit.training.grpo.architectures import ARCHITECTURES, SLIDES, STATES, architecture
from tests.unit.training.grpo.trees import (
    VOCABULARY,
    DecoupledLoss,
    assert_same_gradient,
    call,
    gradient,
    naive_gradients,
    tokens,
    with_adapter,
)

BOUNDS: list[tuple[Path, int]] = [("piecewise", 10_000), ("piecewise", 60), ("packed", 100)]


def shared_calls() -> list[CallTokens]:
    """Segments on both sides of the window of 24 tokens, and turns that continue a call."""
    random = Random(0)
    system, calls = tokens(random, 30), []
    for length in (150, 9):
        market = tokens(random, length)
        for private in (5, 5, 40):
            prompt = system + market + tokens(random, private)
            reply = tokens(random, 6)
            calls.append(call(prompt, reply, random.choice([0.7, 1.0])))
    calls.append(call(prompt + reply + tokens(random, 12), tokens(random, 5)))
    return calls


def check(
    model: Any,
    calls: list[CallTokens],
    bounds: list[tuple[Path, int]] = BOUNDS,
    most: float = 1e-5,
) -> None:
    loss = DecoupledLoss(model, calls)
    reference = torch.stack(naive_gradients(model, calls, loss)).sum(0)
    tree = compile_tree(calls)
    for path, bound in bounds:
        for kept in (0, 10_000) if bound == 60 else (0,):
            forward = PolicyForward(model, max_tokens=bound, path=path)
            forward.keep_tokens = kept
            forward.accumulate(tree, loss)
            assert_same_gradient(gradient(model), reference, most)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_tree_gives_every_architecture_the_gradient_of_the_formula(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = architecture(kind)
    assert PolicyForward(model).path == "piecewise", caplog.text
    check(model, shared_calls())


def branches_of_one_token() -> list[CallTokens]:
    """Inner nodes and leaves of one token, and calls that end in them."""
    random = Random(5)
    start = tokens(random, 20)
    return [
        call([*start, 1, 3, *tokens(random, 4)], [5, 6, 7]),
        call([*start, 1, 3, 9], [8, 2]),
        call([*start, 1, 4, 9], [8]),
        call([*start, 1, 4, 8], [8]),
        call([*start, 2], [8, 9, 1]),
        call([*start, 1], [11]),
        call([7], [11, 4]),
        call([7, 1], [3]),
    ]


def test_all_models_whose_states_branch_are_compared() -> None:
    assert set(STATES) == STATEFUL


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [*((kind, "full") for kind in STATES), ("falcon_h1", "lora"), ("nemotron_h", "lora")],
)
def test_a_models_states_are_kept_where_the_tree_branches(
    kind: str, tuning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In one group, in several, and without sharing."""
    model = architecture(kind)
    if tuning == "lora":
        model = with_adapter(model, 0.05, new_adapter(model, "all", DEFAULT_OPTIONS))
    assert PolicyForward(model).path == "stateful", caplog.text
    calls = shared_calls() + branches_of_one_token()
    # a gated delta rule is fp32 in any model: Qwen's differs by 6e-6 even with weights in fp64
    most = 2e-5 if kind.startswith("qwen3_5") else 1e-5
    check(model, calls, [("stateful", 10_000), ("stateful", 250), ("padded", 2000)], most)


def test_a_shared_state_is_computed_once() -> None:
    model = architecture("granitemoehybrid")
    seen: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    tree = compile_tree(shared_calls())
    PolicyForward(model, max_tokens=10_000, path="stateful").logprobs(tree)
    assert len(seen) < len(tree.nodes)  # neighbouring leaves are one batch
    assert sum(seen) < 1.5 * tree.unique_tokens
    assert not FittingForward(model, None, checkpointing=True).checkpointing  # drops the states
    assert all(layer.mamba.chunk_size == 16 for layer in model.model.layers[:1])


def test_a_hybrids_layers_of_attention_alone_need_no_states(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = architecture("granitemoehybrid", layer_types=["full_attention"] * 2)
    assert PolicyForward(model).path == "piecewise", caplog.text
    check(model, shared_calls())


def test_a_model_with_other_states_is_padded_and_the_log_names_its_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The scan of Mamba 1 starts from zero, whatever state it is given."""
    options = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    model = architecture("jamba", mamba_d_state=8, **options)
    with caplog.at_level(logging.WARNING):
        assert PolicyForward(model).path == "padded"
    assert "layers of type linear_attention, whose state no tree shares" in caplog.text
    check(model, shared_calls(), [("padded", 2000)])
    with pytest.raises(AssertionError):
        check(model, shared_calls(), [("stateful", 10_000)])


def test_a_model_whose_layers_get_their_angles_by_place_is_padded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = architecture(
        "gemma3n_text",
        layer_types=SLIDES,
        head_dim=8,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0, 0.0],
    )
    assert PolicyForward(model).path == "padded"
    assert "its layers do not support our attention ('position_embeddings')" in caplog.text


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_the_routers_loss_is_that_of_transformers(kind: str) -> None:
    """Shared tokens count once for each call, as in a padded batch."""
    model, calls = architecture(kind), shared_calls()
    inputs = [torch.tensor([*one.prompt, *one.completion][:-1]) for one in calls]
    ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in inputs], batch_first=True)
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    (0.5 * out.aux_loss).backward()
    reference = gradient(model)
    for bound, kept in ((10_000, 0), (60, 0), (60, 10_000)):
        forward = PolicyForward(model, max_tokens=bound, router_loss=0.5)
        forward.keep_tokens = kept
        forward.accumulate(compile_tree(calls), lambda _, values: 0 * values.logprobs.sum())
        assert_same_gradient(gradient(model), reference)


def test_a_model_without_routers_has_no_such_loss() -> None:
    with pytest.raises(ValueError, match=r"ROUTER_AUX_LOSS=0.1, but MistralModel has no routers"):
        PolicyForward(architecture("mistral"), router_loss=0.1)


def test_an_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    """Also where a call spans several portions, with a soft cap after the head."""
    model, calls = architecture("gemma2"), shared_calls()
    total = torch.zeros(())
    for one in calls:
        ids = torch.tensor([[*one.prompt, *one.completion][:-1]])
        logits = model(input_ids=ids).logits[0, len(one.prompt) - 1 :] / one.temperature
        total = total + torch.distributions.Categorical(logits=logits).entropy().sum()
    total.backward()  # type: ignore[no-untyped-call]
    reference = gradient(model)
    paths: list[tuple[Path, int]] = [("piecewise", 10_000), ("piecewise", 60), ("padded", 2000)]
    for path, bound in paths:
        forward = PolicyForward(model, max_tokens=bound, path=path, entropy_gradient=True)
        forward.accumulate(compile_tree(calls), lambda _, values: values.entropy.sum())
        assert_same_gradient(gradient(model), reference)


LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 4.0, 8.0],
        "factor": 4.0,
        "original_max_position_embeddings": 100,
        "rope_theta": 1e4,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_frequencies_that_depend_on_the_length_are_those_of_each_call_alone(kind: str) -> None:
    """Calls on both sides of the bound of 100 tokens, in one window."""
    options = {"rope_parameters": LENGTH_DEPENDENT[kind]}
    if kind == "dynamic":
        options["max_position_embeddings"] = 100
    model = architecture("llama", **options)
    check(model, shared_calls(), [("piecewise", 10_000), ("piecewise", 60), ("padded", 2000)])

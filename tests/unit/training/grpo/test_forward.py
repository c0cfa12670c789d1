"""Values and gradients of every path against the formula, one call at a time."""

import logging
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    NemotronConfig,
    NemotronForCausalLM,
)

from babylon.training.grpo import forward as module
from babylon.training.grpo.attention.packed import (
    block_mask,
    compiled_apart,
    flex_variant,
    in_blocks,
    packed_attention,
)
from babylon.training.grpo.attention.piecewise import (
    AttentionRule,
    attend,
    attend_backward,
    piecewise_attention,
)
from babylon.training.grpo.forward import Path, PolicyForward
from babylon.training.grpo.portion_size import portion_tokens
from babylon.training.grpo.portions import cut
from babylon.training.grpo.prefix_tree import PrefixTree, compile_tree
from babylon.training.grpo.training_input import CallTokens
from babylon.training.grpo.tree_forward import Values
from tests.unit.training.grpo.trees import (
    DecoupledLoss,
    assert_same_gradient,
    call,
    gradient,
    model_of,
    naive_gradients,
    naive_logprobs,
    tokens,
)

PATHS: list[tuple[Path, int]] = [
    ("padded", 40),
    ("piecewise", 10_000),
    ("piecewise", 37),
    ("piecewise", 6),
    ("piecewise", 1),
    ("packed", 10_000),
    ("packed", 16),
]
LARGE: list[tuple[Path, int]] = [
    ("padded", 2000),
    ("piecewise", 10_000),
    ("piecewise", 300),
    ("packed", 10_000),
    ("packed", 300),
]


@st.composite
def windows(draw: st.DrawFn) -> list[CallTokens]:
    """Calls along the branches of a random tree, also one-token ones, copies and prefixes."""
    random = Random(draw(st.integers(0, 2**32)))
    branches = [tokens(random, draw(st.integers(1, 12)))]
    for _ in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(branches))
        kept = draw(st.integers(0, len(parent)))  # nothing kept: nothing shared
        branches.append(parent[:kept] + tokens(random, draw(st.integers(1, 12))))
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        branch = draw(st.sampled_from(branches))
        end = draw(st.integers(1, len(branch)))
        completion = branch[end:] + tokens(random, draw(st.integers(1, 4)))
        temperature = draw(st.sampled_from([1.0, 0.7]))
        calls.append(call(branch[:end], completion[: draw(st.integers(1, 6))], temperature))
    return calls + calls[: draw(st.integers(0, 1))]


def accumulated(model: Any, tree: PrefixTree, loss: DecoupledLoss, path: Path, bound: int) -> Any:
    PolicyForward(model, max_tokens=bound, path=path).accumulate(tree, loss)
    return gradient(model)


def check_paths(
    model: Any, calls: Sequence[CallTokens], paths: Sequence[tuple[Path, int]] = PATHS
) -> None:
    loss = DecoupledLoss(model, calls)
    alone = naive_gradients(model, calls, loss)
    reference = torch.stack(alone).sum(0)
    if reference.norm() < 0.1 * sum(float(g.norm()) for g in alone):
        return  # the calls cancel out, and rounding decides
    tree = compile_tree(calls)
    for path, bound in paths:
        assert_same_gradient(accumulated(model, tree, loss, path, bound), reference)


@settings(max_examples=12)
@given(windows())
def test_every_path_gives_the_gradient_of_the_formula(calls: list[CallTokens]) -> None:
    check_paths(model_of(), calls)


@settings(max_examples=6)
@given(windows())
def test_every_path_gives_an_adapter_the_gradient_of_the_formula(calls: list[CallTokens]) -> None:
    check_paths(model_of(lora=True), calls)


def shared_window(seed: int = 0) -> list[CallTokens]:
    """Two scenarios of agents with a common system prompt; segments long enough to be halved."""
    random = Random(seed)
    system, calls = tokens(random, 30), []
    for length in (400, 20):
        market = tokens(random, length)
        for private in (12, 12, 12, 130, 3):
            prompt = system + market + tokens(random, private)
            calls.append(call(prompt, tokens(random, 7), random.choice([0.7, 1.0])))
    return calls


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_other_architectures_and_long_segments(kind: str) -> None:
    check_paths(model_of(kind), [*shared_window(), call([3], [4])], LARGE)


def test_values_equal_a_forward_of_each_call_alone() -> None:
    model, calls = model_of(), shared_window()
    for path, bound in LARGE:
        values = PolicyForward(model, max_tokens=bound, path=path).logprobs(compile_tree(calls))
        alone = torch.cat([naive_logprobs(model, one) for one in calls])
        torch.testing.assert_close(values.logprobs, alone, atol=1e-5, rtol=1e-5)
        assert not values.logprobs.requires_grad


def test_entropy_is_that_of_the_distribution_at_the_logged_temperature() -> None:
    model, one = model_of(), call([5, 6, 7], [8, 9], 0.7)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, 2:] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    for path in ("padded", "piecewise", "packed"):
        entropy = PolicyForward(model, path=path).logprobs(compile_tree([one])).entropy
        torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=1e-5)


def test_neither_order_nor_splitting_a_window_changes_the_gradient() -> None:
    model, calls = model_of(), shared_window()
    tree, loss = compile_tree(calls), DecoupledLoss(model, calls)
    whole = accumulated(model, tree, loss, "piecewise", 500)
    forward = PolicyForward(model, max_tokens=500, path="piecewise")
    for parts in ([[9, 4, 1, 0], [2, 8, 3], [7, 6, 5]], [list(range(9, -1, -1))]):
        for part in parts:

            def of_part(chosen: Sequence[int], values: Values, part: list[int] = part) -> Tensor:
                return loss([part[index] for index in chosen], values)

            forward.accumulate(tree.only(part), of_part)
        assert_same_gradient(gradient(model), whole)


def tokens_forwarded(model: Any, tree: PrefixTree, bound: int) -> list[int]:
    """Tokens of every pass through the embedding."""
    seen: list[int] = []

    def count(_: Any, inputs: Any) -> None:
        seen.append(inputs[0].numel())

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    loss = DecoupledLoss(model, tree.calls)
    seen.clear()
    PolicyForward(model, max_tokens=bound, path="piecewise").accumulate(tree, loss)
    hook.remove()
    return seen


def test_a_shared_prefix_is_forwarded_once_and_no_portion_exceeds_the_bound() -> None:
    model, tree = model_of(), compile_tree(shared_window())
    assert tokens_forwarded(model, tree, 10_000) == [tree.unique_tokens]
    portions = tokens_forwarded(model, tree, 200)
    assert max(portions) <= 200 and len(portions) > 5


def test_frozen_lower_layers_stay_without_gradient() -> None:
    model, calls = model_of("qwen2"), shared_window()
    for parameter in [*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()]:
        parameter.requires_grad_(False)
    loss = DecoupledLoss(model, calls)
    reference = torch.stack(naive_gradients(model, calls, loss)).sum(0)
    for bound in (10_000, 100):
        ours = accumulated(model, compile_tree(calls), loss, "piecewise", bound)
        assert_same_gradient(ours, reference)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing_recomputes_and_changes_no_gradient() -> None:
    model, calls = model_of(num_hidden_layers=3), shared_window()
    tree, loss = compile_tree(calls), DecoupledLoss(model, calls)
    passes: list[bool] = []
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: passes.append(torch.is_grad_enabled())
    )
    reference = accumulated(model, tree, loss, "piecewise", 300)
    without = len(passes)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ours = accumulated(model, tree, loss, "piecewise", 300)
    assert_same_gradient(ours, reference)
    assert len(passes) - without > without and not model.model.layers[0].training


@pytest.mark.parametrize(
    ("width", "chosen", "expected"), [(32, None, 1), (320, None, 3), (32, "2", 3)]
)
def test_a_narrow_model_is_trained_with_one_thread_unless_the_user_chose(
    width: int, chosen: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    model, tree = model_of(hidden_size=width), compile_tree(shared_window())
    forward, seen, before = PolicyForward(model), set[int](), torch.get_num_threads()
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        forward.logprobs(tree)
        with pytest.raises(ZeroDivisionError):
            forward.accumulate(tree, lambda *_: 1 / 0)
        assert (seen, torch.get_num_threads()) == ({expected}, 3)
    finally:
        torch.set_num_threads(before)


def test_an_error_in_the_middle_comes_through_and_leaves_the_model_usable() -> None:
    model, calls = model_of(), shared_window()
    tree, loss = compile_tree(calls), DecoupledLoss(model, calls)
    reference = accumulated(model, tree, loss, "piecewise", 10_000)

    def exhausted(chosen: Sequence[int], values: Values) -> Tensor:
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        PolicyForward(model, max_tokens=400, path="piecewise").accumulate(tree, exhausted)
    model.zero_grad()
    naive_logprobs(model, calls[0])  # the model attends as before
    assert_same_gradient(accumulated(model, tree, loss, "piecewise", 200), reference)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("bound", [10_000, 300])
@pytest.mark.parametrize(
    ("rule", "with_sinks"),
    [
        (AttentionRule(0.3), False),
        (AttentionRule(0.3, window=50), False),
        (AttentionRule(0.3, window=50, softcap=1.0), True),
    ],
)
def test_all_kernels_attend_alike(bound: int, rule: AttentionRule, with_sinks: bool) -> None:
    """CUDA's kernel, uncompiled; the pieces; and all scores at once."""
    sinks = torch.tensor([0.5, -1.0]) if with_sinks else None
    for portion in cut(compile_tree(shared_window()), bound)[0]:
        layout = portion.layout
        query, key, value = torch.randn(3, 1, 2, len(layout.first), 16)
        query = query[:, :, : layout.queries]
        mask = block_mask(layout, rule.window, torch.device("cpu"))
        fused = in_blocks(
            flex_variant(rule.softcap, with_sinks), query, key, value, mask, rule, sinks
        )
        assert fused.isfinite().all()
        for kernel in (piecewise_attention, packed_attention):
            ours = kernel(query, key, value, layout, rule, sinks)
            torch.testing.assert_close(ours, fused, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_sizes_alone_recompile_the_fused_kernel_at_most_twice(window: int | None) -> None:
    """torch gives up after eight. Other dtypes, gradients and masks have counters of their own."""
    kernels = [CompileCounter(), CompileCounter()]
    tree = compile_tree(shared_window())
    portions = [portion for bound in (10_000, 300, 120) for portion in cut(tree, bound)[0]]
    for counter, dtype in zip(kernels, (torch.float32, torch.bfloat16), strict=True):
        kernel = compiled_apart(flex_variant(None, False), counter)
        for portion in portions:
            layout = portion.layout
            query, key, value = torch.randn(3, 1, 2, len(layout.first), 16, dtype=dtype)
            query, mask = query[:, :, : layout.queries], block_mask(layout, window, query.device)
            in_blocks(kernel, query, key, value, mask, AttentionRule(0.3, window=window), None)
    assert all(1 <= counter.frame_count <= 3 for counter in kernels)


@pytest.mark.parametrize("bound", [10_000, 300])
def test_the_fused_kernel_visits_exactly_the_blocks_with_a_visible_pair(bound: int) -> None:
    for portion in cut(compile_tree(shared_window()), bound)[0]:
        mask = block_mask(portion.layout, None, torch.device("cpu"))
        queries, keys = mask.seq_lengths
        pairs = torch.zeros(queries, keys, dtype=torch.bool)
        seen = visible(portion.layout)
        pairs[: len(seen), : seen.shape[1]] = seen
        pairs[len(seen) :, -1] = True  # padded queries attend to the last padded key
        blocks = pairs.view(queries // 128, 128, keys // 128, 128).transpose(1, 2).flatten(2)
        assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(-1))
        assert mask.full_kv_num_blocks is not None
        assert torch.equal(mask.full_kv_num_blocks[0, 0].long(), blocks.all(-1).sum(1))


def visible(layout: Any) -> Tensor:
    query = torch.arange(layout.queries)[:, None]
    first, last = torch.from_numpy(layout.first), torch.from_numpy(layout.last)
    return (first <= query) & (query < last)


def small(config: Any, **options: Any) -> Any:
    return config(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )


def not_standard() -> list[tuple[Any, str]]:
    sizes = {"intermediate_size": 48, "num_key_value_heads": 2}
    return [
        (GPT2LMHeadModel(small(GPT2Config)), "has no .layers"),
        (NemotronForCausalLM(small(NemotronConfig, **sizes)), "do not support our attention"),
    ]


@pytest.mark.parametrize("number", range(2))
def test_unusual_models_are_padded_logged(number: int, caplog: pytest.LogCaptureFixture) -> None:
    model, reason = not_standard()[number]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    with caplog.at_level(logging.WARNING):
        forward = PolicyForward(model)
    assert forward.path == "padded" and reason in caplog.text
    calls = [call([3, 4, 5, 6, 7], [8, 9, 10]), call([3, 4, 5], [6])]
    values = forward.logprobs(compile_tree(calls)).logprobs
    alone = torch.cat([naive_logprobs(model, one) for one in calls])
    torch.testing.assert_close(values, alone, atol=1e-4, rtol=1e-4)


def test_standard_models_take_the_piecewise_path_on_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of("qwen3", lora=True)
    model.train()
    assert PolicyForward(model).path == "piecewise"
    assert not caplog.records and not model.training


def test_bf16_activations_keep_the_gradient_close() -> None:
    model, calls = model_of(), shared_window()
    tree, loss = compile_tree(calls), DecoupledLoss(model, calls)
    own = PolicyForward(model).logprobs(tree).logprobs
    loss.mu = loss.proximal = list(own.split(7))  # ratios near one: nothing is clipped
    exact = accumulated(model, tree, loss, "piecewise", 10_000)
    with torch.autocast("cpu", torch.bfloat16):
        for path, bound in LARGE:
            rough = accumulated(model, tree, loss, path, bound)
            assert float(torch.cosine_similarity(rough, exact, dim=0)) > 0.98, (path, bound)


@pytest.mark.parametrize("kind", ["dense", "causal", "masked"])
def test_explicit_pieces_equal_the_fused_ones(kind: str) -> None:
    torch.manual_seed(0)
    query, grad = torch.randn(2, 3, 4, 20, 16)
    key, value = torch.randn(2, 3, 2, 20, 16)
    mask = torch.zeros(20, 20).masked_fill(torch.rand(20, 20) < 0.5, -torch.inf).fill_diagonal_(0)
    options = mask if kind == "masked" else None, kind == "causal"
    found = []
    for softcap in (None, 1e4):  # a cap that scores never reach, which the fused ones lack
        rule = AttentionRule(0.3, softcap=softcap)
        out, lse = attend(query, key, value, rule, *options)
        grads = attend_backward(grad, query, key, value, out, lse, rule, *options)
        found.append((out, lse, *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("device", "hidden_size", "room", "tokens"),
    [
        ("cpu", 64, 0, 3072),
        ("cpu", 512, 0, 1024),
        ("cpu", 4096, 0, 512),
        ("cuda", 4096, 9_000, 16_384),  # halved where that is too many
        ("cuda", 896, 40_000, 24_000),
        ("cuda", 64, 1e6, 65_536),
    ],
)
def test_wide_models_are_forwarded_in_smaller_portions(device, hidden_size, room, tokens):
    assert portion_tokens(device, hidden_size, room) == tokens


@pytest.mark.parametrize(
    ("path", "together", "portion", "kept"),
    [
        ("packed", False, 24_000, 16_000),  # no more than fits together
        ("packed", True, 16_384, 0),  # a lack of memory would end the ranks
        ("padded", False, 16_384, 65_536),  # it has all logits in memory
    ],
)
def test_only_the_tree_fills_a_gpus_memory(
    monkeypatch: pytest.MonkeyPatch, path: Any, together: bool, portion: int, kept: int
) -> None:
    passes = Mock(together=together)
    monkeypatch.setattr(module, "passes_of", lambda _: passes)
    monkeypatch.setattr(module, "tokens_in_memory", lambda *_: 40_000)
    monkeypatch.setattr(
        module, "portion_tokens", lambda _, width, room=0: portion_tokens("cuda", width, room)
    )
    forward = PolicyForward(model_of(), path=path)
    assert (forward.max_tokens, forward.keep_tokens) == (portion, kept)


@pytest.mark.slow
def test_a_context_of_32k_tokens_has_the_gradient_of_the_formula() -> None:
    """Two calls in eleven portions, which share all but their last 60 tokens."""
    random = Random(0)
    start = tokens(random, 32_700)
    calls = [call([*start, *tokens(random, 20)], tokens(random, 40)) for _ in range(2)]
    model = model_of(num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=32_768)
    loss = DecoupledLoss(model, calls)
    reference = torch.stack(naive_gradients(model, calls, loss)).sum(0)
    forward = PolicyForward(model)
    assert forward.path == "piecewise" and forward.max_tokens == 3072
    forward.accumulate(compile_tree(calls), loss)
    assert_same_gradient(gradient(model), reference)

"""Both tree paths on CUDA against the formula, one call at a time."""

from typing import Any

import pytest
import torch

from babylon.training.grpo.attention.packed import (
    block_mask,
    compiled_apart,
    flex_variant,
    in_blocks,
)
from babylon.training.grpo.attention.paths import path_attention, takes_paths
from babylon.training.grpo.attention.piecewise import AttentionRule
from babylon.training.grpo.forward import Path, PolicyForward
from babylon.training.grpo.portions import cut
from babylon.training.grpo.prefix_tree import compile_tree
from tests.unit.training.grpo.architectures import architecture
from tests.unit.training.grpo.test_architectures import shared_calls
from tests.unit.training.grpo.test_forward import shared_window
from tests.unit.training.grpo.trees import (
    DecoupledLoss,
    assert_same_gradient,
    gradient,
    model_of,
    naive_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("path", "bound"), [("packed", 10_000), ("packed", 300), ("piecewise", 300), ("padded", 2000)]
)
def test_every_path_gives_the_gradient_of_the_formula(path: Path, bound: int, lora: bool) -> None:
    calls = shared_window()
    reference_model = model_of(lora=lora, head_dim=64)
    loss = DecoupledLoss(reference_model, calls)
    reference = torch.stack(naive_gradients(reference_model, calls, loss)).sum(0)
    model = reference_model.cuda()
    loss.proximal = [p.cuda() for p in loss.proximal]
    loss.mu = [mu.cuda() for mu in loss.mu]
    PolicyForward(model, max_tokens=bound, path=path).accumulate(compile_tree(calls), loss)
    assert_same_gradient(gradient(model).cpu(), reference)


@pytest.mark.parametrize("bound", [10_000, 300, 100])
def test_both_kernels_attend_and_go_back_alike(bound: int) -> None:
    """FlashAttention over copied paths beside FlexAttention, in bf16."""
    rule = AttentionRule(0.3)
    for portion in cut(compile_tree(shared_window()), bound)[0]:
        layout = portion.layout
        heads = [torch.randn(1, n, len(layout.first), 64, device="cuda") for n in (4, 2, 2)]
        query, key, value = (one.bfloat16().requires_grad_() for one in heads)
        query = query.detach()[:, :, : layout.queries].requires_grad_()
        assert takes_paths(query, value, layout, rule, None)
        mask = block_mask(layout, None, query.device)
        kernel = compiled_apart(flex_variant(None, False))
        found = []
        for out in (
            in_blocks(kernel, query, key, value, mask, rule, None),
            path_attention(query, key, value, layout, rule),
        ):
            grads = torch.autograd.grad(out.float().square().sum(), (query, key, value))
            found.append([out, *grads])
        for one, other in zip(*found, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-2


def test_cuda_takes_the_packed_path() -> None:
    assert PolicyForward(model_of(head_dim=64).cuda()).path == "packed"


@pytest.mark.parametrize("path", ["packed", "piecewise"])
def test_bf16_products_stay_near_fp32(path: Path) -> None:
    calls, model = shared_window(), model_of(head_dim=64).cuda()
    tree = compile_tree(calls)

    def logprobs(path: Path) -> Any:
        return PolicyForward(model, max_tokens=300, path=path).logprobs(tree).logprobs

    exact = logprobs("padded")
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(logprobs(path), exact, atol=0.3, rtol=0.0)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_other_architectures_have_the_gradient_of_the_formula(kind: str) -> None:
    """Windows, soft caps, sinks and values of another width, in the compiled kernel."""
    model = architecture(kind)
    calls = shared_calls()
    loss = DecoupledLoss(model, calls)
    reference = torch.stack(naive_gradients(model, calls, loss)).sum(0)
    model = model.cuda()
    loss.proximal = [p.cuda() for p in loss.proximal]
    loss.mu = [mu.cuda() for mu in loss.mu]
    PolicyForward(model, max_tokens=100, path="packed").accumulate(compile_tree(calls), loss)
    assert_same_gradient(gradient(model).cpu(), reference)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
def test_no_mix_of_dtypes_gradients_and_sizes_exhausts_the_compiler(kind: str) -> None:
    """Beyond its limit, torch would run FlexAttention with all scores in memory."""
    model, tree = architecture(kind).cuda(), compile_tree(shared_calls())
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for bound in (30, 60, 100, 300):
            forward = PolicyForward(model, max_tokens=bound, path="packed")
            for dtype in (torch.bfloat16, torch.float32):
                with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
                    forward.logprobs(tree)
                    forward.accumulate(tree, lambda _, values: values.logprobs.sum())

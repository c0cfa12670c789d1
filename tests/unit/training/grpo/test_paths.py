"""FlashAttention over copied paths: the cut into segments, gradients, and what is kept."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from babylon.training.grpo.attention import paths as module
from babylon.training.grpo.attention.layout import Layout
from babylon.training.grpo.attention.paths import (
    Paths,
    path_attention,
    paths_of,
    segments_attend,
    takes_paths,
)
from babylon.training.grpo.attention.piecewise import AttentionRule, piecewise_attention
from babylon.training.grpo.portions import cut
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens
from tests.unit.training.grpo.test_forward import shared_window

RULE = AttentionRule(0.3)


def layouts(bound: int) -> list[Layout]:
    """Return the layouts of all portions, and of every other query of each."""
    whole = [portion.layout for portion in cut(compile_tree(shared_window()), bound)[0]]
    return whole + [one.select(np.arange(0, one.queries, 2)) for one in whole]


def inputs(layout: Layout, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, len(layout.first), 16, dtype=dtype)
    given = query[:, :, : layout.queries], key[:, :2], value[:, :2]
    return [one.detach().requires_grad_() for one in given]


@pytest.mark.parametrize("bound", [10_000, 300, 100])
def test_values_and_gradients_are_those_of_the_pieces(bound: int) -> None:
    for layout in layouts(bound):
        found = []
        for kernel in (piecewise_attention, path_attention):
            given = inputs(layout)
            out = kernel(*given, layout, RULE)
            found.append([out, *torch.autograd.grad(out.square().sum(), given)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_key_that_many_paths_share_is_copied_for_each_segment() -> None:
    [layout] = [one for one in layouts(10_000) if one.queries == len(one.first)]
    paths = paths_of(layout, torch.device("cpu"))
    seen = (layout.first[:, None] <= np.arange(layout.queries)) & (
        np.arange(layout.queries) < layout.last[:, None]
    )
    ends = paths.query_starts[1:].numpy() - 1  # the last query of a segment sees its whole path
    assert int(seen[:, ends].sum()) == len(paths.keys)
    assert paths.longest_segment == int(paths.query_starts.diff().max())
    assert paths.longest_path == int(paths.key_starts.diff().max())


class Saving(torch.autograd.Function):
    """In the kernel's place: it keeps its inputs, as the kernel does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(key, value)
        return query * key.sum() * value.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        key, value = ctx.saved_tensors
        return grad, torch.full_like(key, 2), torch.full_like(value, 3)


@pytest.mark.parametrize("recomputed", [False, True])
def test_copies_are_not_kept_until_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, recomputed: bool
) -> None:
    layout = layouts(10_000)[0]
    given, copies = inputs(layout, torch.bfloat16), list[weakref.ref[Tensor]]()
    paths = paths_of(layout, torch.device("cpu"))
    times = paths.keys.bincount(minlength=len(layout.first)).float()

    def copied(source: Tensor, to: Paths, copy: Any = module._copied) -> Tensor:
        made: Tensor = copy(source, to)
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(module, "segments_attend", lambda q, k, v, *_: Saving.apply(q, k, v))
    monkeypatch.setattr(module, "_copied", copied)
    if recomputed:
        out = checkpoint(path_attention, *given, layout, RULE, use_reentrant=False)
    else:
        out = path_attention(*given, layout, RULE)
    assert [one() for one in copies] == [None, None]
    _, key, value = torch.autograd.grad(out.sum(), given)
    assert len(copies) == 4  # once more each
    for grad, each in ((key, 2), (value, 3)):
        assert torch.equal(grad[0, 0, :, 0].float(), (each * times).bfloat16().float())


@pytest.mark.parametrize(
    ("dtype", "width", "rule", "taken"),
    [
        (torch.bfloat16, 16, RULE, True),
        (torch.float32, 16, RULE, False),
        (torch.bfloat16, 12, RULE, False),
        (torch.bfloat16, 16, AttentionRule(0.3, window=50), False),
        (torch.bfloat16, 16, AttentionRule(0.3, softcap=20.0), False),
    ],
)
def test_only_what_flash_attention_knows_takes_paths(
    dtype: torch.dtype, width: int, rule: AttentionRule, taken: bool
) -> None:
    layout = layouts(10_000)[0]
    heads = torch.zeros(1, 2, layout.queries, width, dtype=dtype)
    assert takes_paths(heads, heads, layout, rule, None) is taken
    assert not takes_paths(heads, heads, layout, rule, torch.zeros(2))
    assert not takes_paths(heads, heads[..., :8], layout, rule, None)


def test_many_short_branches_of_a_long_text_are_not_copied() -> None:
    """Each of 100 replies of a few tokens would copy a prompt of 1,000."""
    prompt = list(range(1, 1001))
    calls = [CallTokens(prompt=prompt, completion=[n, 1, 2], logprobs=None) for n in range(100)]
    [portion] = cut(compile_tree(calls), 10_000)[0]
    heads = torch.zeros(1, 2, portion.layout.queries, 16, dtype=torch.bfloat16)
    module.paths_of.cache_clear()
    assert not takes_paths(heads, heads, portion.layout, RULE, None)
    assert not module.paths_of.cache_info().currsize  # nor is a list of the copies made


def test_many_short_segments_are_not_taken() -> None:
    """The kernel adds 128 rows of fp32 to each of them in its backward pass."""
    calls = [
        CallTokens(prompt=[1, 2, 3], completion=[n, *rest], logprobs=None)
        for n in range(1000)
        for rest in ([1, 2], [2, 1])
    ]
    [portion] = cut(compile_tree(calls), 10_000)[0]
    heads = torch.zeros(1, 2, portion.layout.queries, 16, dtype=torch.bfloat16)
    copies = paths_of(portion.layout, torch.device("cpu")).keys
    assert len(copies) < 8 * len(portion.layout.first)
    assert not takes_paths(heads, heads, portion.layout, RULE, None)


def test_torchs_kernel_takes_groups_of_heads() -> None:
    """On a device that is not there: torch checks the arguments, and computes shapes."""
    with FakeTensorMode():
        query, key = (torch.empty(n, heads, 64, device="cuda") for n, heads in ((7, 4), (20, 2)))
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        paths = Paths(
            keys=starts,
            query_starts=starts,
            key_starts=starts,
            longest_segment=5,
            longest_path=15,
        )
        out = segments_attend(query, key, key, paths, 0.3)
    assert out.shape == query.shape and out.is_cuda

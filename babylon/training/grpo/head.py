"""The language-model head, apart from its backbone."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

_ONE_THREAD = Lock()  # of two at once, the later one would put TF32 back, and leave it on


def head_alone(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits ``[R, V]`` of hidden states ``[R, h]``, by the model's own forward pass.

    The backbone is replaced by one that returns ``hidden``. Scales and soft caps of logits are thus
    those of the model, whatever it calls them. Products of an fp32 head are TF32 on CUDA, four
    times as fast: they move a logit far less than the backbone's bf16 does.
    """
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hidden = hidden.to(next(head.parameters()).dtype)
    given = MoeModelOutputWithPast(last_hidden_state=cast(torch.FloatTensor, hidden[None]))
    modules, name = model._modules, model.base_model_prefix
    backbone = cast(nn.Module, modules[name])
    modules[name] = _Given(given, backbone)
    try:
        with _in_tf32(head):
            logits: Tensor = model(inputs_embeds=hidden[None], use_cache=False).logits
    finally:
        modules[name] = backbone
    return logits.flatten(0, 1)  # an index would write a second gradient of all logits


class _Given(nn.Module):
    """A backbone that has already run. Some models scale their logits by a factor of it."""

    def __init__(self, output: object, backbone: nn.Module) -> None:
        super().__init__()
        self._output = output
        self._backbone = (backbone,)  # a tuple, so that it is no submodule

    def forward(self, *_: object, **__: object) -> object:
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_backbone"][0], name)


@contextmanager
def _in_tf32(head: nn.Module) -> Iterator[None]:
    """Let a plain fp32 head on CUDA compute with :func:`tf32_linear`. Others stay as they are."""
    weight = next(head.parameters())
    replaced = "forward" in vars(head)  # by accelerate, for example
    exact = weight.dtype == torch.float32 and weight.is_cuda
    if type(head) is not nn.Linear or replaced or not exact:
        yield
        return
    vars(head)["forward"] = lambda hidden: tf32_linear(hidden, head.weight, head.bias)
    try:
        yield
    finally:
        del vars(head)["forward"]


def tf32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear`` with products in TF32, forward and backward, and in nothing else.

    torch sets the precision for a whole process, and rotary angles, which are fp32 products too,
    need all of it.
    """
    logits: Tensor = _Tf32Linear.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return logits if bias is None else logits + bias


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, bool]


class _Tf32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        with _tf32():
            return linear(hidden, weight)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad
        with _tf32():
            return (
                grad @ weight if of_hidden else None,
                grad.flatten(0, -2).T @ hidden.flatten(0, -2) if of_weight else None,
            )


@contextmanager
def _tf32() -> Iterator[None]:
    with _ONE_THREAD:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

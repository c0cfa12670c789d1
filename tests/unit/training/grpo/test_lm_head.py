"""The head against a log-softmax over everything at once."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from babylon.training.grpo import head as head_module
from babylon.training.grpo import tree_forward as module
from babylon.training.grpo.head import _in_tf32, tf32_linear
from babylon.training.grpo.tree_forward import token_values

ROWS, TERMS, WIDTH, VOCABULARY = 50, 90, 8, 31


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, temperatures, rows (several targets each, some none) and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    row = torch.randint(ROWS, (TERMS,), generator=generator).sort().values
    target = torch.randint(VOCABULARY, (TERMS,), generator=generator)
    return hidden, temperature, row, target


def whole(
    head: Callable[[Tensor], Tensor], hidden: Tensor, temperature: Tensor, row: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(hidden).float() / temperature[:, None], -1)
    return logprobs[row, y], -(logprobs.exp() * logprobs).sum(-1)[row]


def gradients(of: tuple[Tensor, Tensor], hidden: Tensor, head: nn.Module) -> list[Tensor]:
    weights = torch.linspace(-1, 2, TERMS)
    trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    hidden.grad = None
    head.zero_grad()
    (of[0] * weights).sum().backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in trained if p.grad is not None]


def heads() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    frozen = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)
    adapted = get_peft_model(  # type: ignore[type-var]
        nn.Sequential(nn.Linear(WIDTH, VOCABULARY)), LoraConfig(r=2, target_modules=["0"])
    )
    nn.init.normal_(adapted.base_model.model[0].lora_B["default"].weight)
    return {
        "bias": nn.Linear(WIDTH, VOCABULARY),
        "no bias": nn.Linear(WIDTH, VOCABULARY, bias=False),
        "frozen": frozen,
        "lora": adapted,
    }


@pytest.mark.parametrize("rows", [1, 7, 50, 1000])
@pytest.mark.parametrize("kind", ["bias", "no bias", "frozen", "lora"])
def test_chunks_equal_the_whole(monkeypatch: pytest.MonkeyPatch, kind: str, rows: int) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(module, "_MIN_ROWS", rows)
    head, (hidden, *rest) = heads()[kind].eval(), inputs()
    expected = whole(head, hidden, *rest)
    ours = token_values(head, VOCABULARY, hidden, *rest)
    torch.testing.assert_close(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1])
    for got, want in zip(
        gradients(ours, hidden, head), gradients(expected, hidden, head), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_the_gradient_of_the_entropy_is_that_of_the_whole() -> None:
    head, (hidden, *rest) = heads()["bias"].double(), inputs()
    hidden = hidden.detach().double().requires_grad_()
    logits = head(hidden) / rest[0].double()[:, None]
    expected = torch.distributions.Categorical(logits=logits).entropy()[rest[1]]
    ours = token_values(head, VOCABULARY, hidden, *rest)[1]
    weights = torch.linspace(-1, 2, TERMS, dtype=torch.float64)
    [want] = torch.autograd.grad((expected * weights).sum(), hidden)
    [got] = torch.autograd.grad((ours * weights).sum(), hidden)
    torch.testing.assert_close(got, want)


def test_no_more_than_a_chunk_of_logits_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(module, "_MIN_ROWS", 7)
    linear, widths, saved = nn.Linear(WIDTH, VOCABULARY), list[int](), list[int]()

    def head(hidden: Tensor) -> Any:
        widths.append(len(hidden))
        return linear(hidden)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    hidden, *rest = inputs()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = token_values(head, VOCABULARY, hidden, *rest)
    assert max(widths) == 7 and max(saved) < 7 * VOCABULARY
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert max(widths) == 7 and sum(widths) == 2 * ROWS


def test_half_precision_logits_are_reduced_in_fp32() -> None:
    head, (hidden, *rest) = heads()["bias"].to(torch.bfloat16), inputs()
    hidden = hidden.detach().to(torch.bfloat16).requires_grad_()
    ours, entropy = token_values(head, VOCABULARY, hidden, *rest)
    expected, _ = whole(head, hidden, *rest)
    assert ours.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(ours, expected)
    ours.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_logits_are_not_rounded_under_autocast() -> None:
    hidden, *others = inputs()
    head = heads()["bias"]
    exact = token_values(head, VOCABULARY, hidden, *others)
    slopes = gradients(exact, hidden, head)
    with torch.autocast("cpu", torch.bfloat16):
        values = token_values(head, VOCABULARY, hidden, *others)
    mixed = gradients(values, hidden, head)
    for one, other in zip((*exact, *slopes), (*values, *mixed), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def to_tf32(tensor: Tensor) -> Tensor:
    """Round to eleven significant bits, as a tensor core reads fp32 under TF32."""
    bits = tensor.detach().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(
    ("precision", "unit", "typical"), [("tf32", 2**-11, 2e-3), ("bf16", 2**-8, 2e-2)]
)
def test_a_coarse_head_moves_a_logprob_no_further_than_its_bound(
    precision: str, unit: float, typical: float
) -> None:
    """With unit roundoff u, a logit moves by (2u + u^2) sum_i |h_i w_i|, and in bf16 its own
    rounding adds u |z|. A logprob moves by twice the largest, over the temperature.
    """
    torch.manual_seed(0)
    width, vocabulary = 256, 2000
    hidden, weight = torch.randn(64, width), torch.randn(vocabulary, width) / width**0.5
    temperature, row = torch.full((64,), 0.7), torch.arange(64)
    target = torch.randint(vocabulary, (64,))

    def logprobs(head: Callable[[Tensor], Tensor]) -> Tensor:
        return token_values(head, vocabulary, hidden, temperature, row, target)[0]

    exact = logprobs(lambda given: given @ weight.T)
    bound = (2 * unit + unit**2) * (hidden.abs() @ weight.abs().T)
    if precision == "tf32":
        coarse = logprobs(lambda given: to_tf32(given) @ to_tf32(weight).T)
    else:
        coarse = logprobs(lambda given: given.bfloat16() @ weight.bfloat16().T)
        bound = bound + unit * ((hidden @ weight.T).abs() + bound)
    moved = (coarse - exact).abs()
    assert (moved <= 2 * bound.amax(1) / 0.7).all()
    assert unit / 10 < float(moved.mean()) < typical


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_head_in_tf32_is_a_linear_layer_and_leaves_torchs_precision(
    bias: bool, frozen: bool
) -> None:
    """On the CPU, where TF32 changes nothing."""
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=torch.float64).requires_grad_(not frozen)
    hidden = torch.randn(1, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for logits in (head(hidden), tf32_linear(hidden, head.weight, head.bias)):
        trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
        found.append([logits, *torch.autograd.grad(logits.square().sum(), trained)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.get_float32_matmul_precision() == "highest"


def test_heads_of_two_threads_leave_torchs_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins while the first computes, and would end after it."""
    began, first_ended = Event(), Event()
    head, hidden = torch.ones(3, 2), torch.ones(1, 2)

    def second(hidden: Tensor, weight: Tensor) -> Tensor:
        began.set()
        first_ended.wait()
        return hidden @ weight.T

    def first(hidden: Tensor, weight: Tensor) -> Tensor:
        monkeypatch.setattr(head_module, "linear", second)
        other.start()
        began.wait(0.1)  # it must not come
        return hidden @ weight.T

    other = Thread(target=tf32_linear, args=(hidden, head, None))
    monkeypatch.setattr(head_module, "linear", first)
    tf32_linear(hidden, head, None)
    first_ended.set()
    other.join()
    found = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert found == "highest"


def head_on_cuda(kind: type[nn.Linear] = nn.Linear, dtype: torch.dtype = torch.float32) -> Any:
    with FakeTensorMode():
        weight = torch.empty(VOCABULARY, WIDTH, dtype=dtype, device="cuda")
    head = kind(WIDTH, VOCABULARY, bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def test_a_plain_fp32_head_on_cuda_takes_tf32_for_one_pass() -> None:
    head = head_on_cuda()
    with _in_tf32(head):
        assert "forward" in vars(head)
    assert "forward" not in vars(head)


@pytest.mark.parametrize("why", ["bf16", "other class", "hooked"])
def test_other_heads_keep_their_forward_pass(why: str) -> None:
    """Such as one with an adapter, or one that accelerate hooks into."""
    kind = type("Adapted", (nn.Linear,), {}) if why == "other class" else nn.Linear
    head = head_on_cuda(kind, torch.bfloat16 if why == "bf16" else torch.float32)
    if why == "hooked":
        head.forward = lambda hidden: hidden
    before = dict(vars(head))
    with _in_tf32(head):
        assert vars(head) == before
    assert vars(head) == before

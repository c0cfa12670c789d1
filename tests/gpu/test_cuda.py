"""Training on CUDA: whole updates, and a real lack of memory. Skipped where there is no GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from babylon.evaluation.arena.checkpoint_replies import reply_policy
from babylon.policies.load import load_policy
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.forward import mixed_precision
from babylon.training.grpo.head import head_alone
from babylon.training.grpo.trainer import train_on_window
from babylon.training.grpo.training_window import compile_window
from babylon.training.trainable import Tuning
from babylon.training.update import update_checkpoint
from tests.tiny_policy import save_tiny_policy
from tests.unit.training.grpo.test_memory import wide_model, wide_window
from tests.unit.training.grpo.windows import Probe, relative_error, trained_gradient
from tests.unit.training.test_update import CONFIG, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_an_update_on_cuda_moves_the_policy_and_it_answers(tmp_path: Path, tuning: Tuning) -> None:
    parent = save_tiny_policy(tmp_path / "parent", seed=0)
    update = update_checkpoint(parent, rows(), tmp_path / "v1", tuning=tuning, config=CONFIG)
    assert update.report.kl_after > 0
    model, _ = load_policy(tmp_path / "v1")
    assert next(model.parameters()).is_cuda and next(model.parameters()).dtype == torch.float32
    chat = [{"role": "user", "content": "m1 0.50"}]
    [reply] = reply_policy(str(tmp_path / "v1"))([chat], [0])
    assert isinstance(reply, str)


def test_products_are_bf16_on_fp32_weights_and_every_weight_gets_its_gradient() -> None:
    """Also after a pass without gradient; on CPU they stay fp32."""
    assert not isinstance(mixed_precision(torch.nn.Linear(1, 1)), torch.autocast)
    trajectories, model = wide_window(), wide_model().cuda()
    mixed = trained_gradient(model, trajectories, max_tokens=300)
    exact = trained_gradient(wide_model(), trajectories).cuda()
    assert 1e-6 < relative_error(mixed, exact) < 5e-2


def test_the_head_alone_is_in_tf32() -> None:
    """Near the exact logits, not equal to them; the model's own forward pass stays exact."""
    model = wide_model().cuda()
    hidden = torch.randn(64, model.config.hidden_size, device="cuda", requires_grad=True)
    exact, logits = model.get_output_embeddings()(hidden), head_alone(model, hidden)
    grads = [torch.autograd.grad(one.square().sum(), hidden)[0] for one in (exact, logits)]
    for one, other in ((logits, exact), grads):
        assert 0 < float((one - other).norm() / other.norm()) < 2e-3
    assert torch.equal(model.get_output_embeddings()(hidden), exact)


@pytest.fixture
def memory_for_half_a_step() -> Iterator[torch.Tensor]:
    """Lets this process have half of what one full-window step takes; gives its gradient."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = trained_gradient(wide_model().cuda(), wide_window())
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.5 * peak / torch.cuda.mem_get_info()[1])
    yield whole
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_beyond_the_gpus_memory_is_repeated_in_smaller_portions(
    memory_for_half_a_step: torch.Tensor,
) -> None:
    model = wide_model().cuda()
    probe = Probe(model)
    config = TrainerConfig(iterations=1, trajectories_per_step=100, grad_clip=1e9)
    report = train_on_window(model, probe, compile_window(wide_window(), config))
    assert report.oom_halvings > 0
    assert relative_error(probe.gradients[-1], memory_for_half_a_step) < 1e-2  # bf16 products

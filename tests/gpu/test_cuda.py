"""Training on CUDA: bf16 matrix products, fp32 weights. Skipped where there is no GPU."""

from pathlib import Path

import pytest
import torch

from babylon.checkpoints.load import load_policy
from babylon.checkpoints.trainable import Tuning
from babylon.checkpoints.update import update_checkpoint
from babylon.engine.reply import reply_policy
from babylon.grpo.trainer import TrainerConfig
from tests.tiny_policy import save_tiny_policy
from tests.unit.checkpoints.test_update import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_an_update_on_cuda_moves_the_policy_and_it_answers(tmp_path: Path, tuning: Tuning) -> None:
    parent = save_tiny_policy(tmp_path / "parent", seed=0)
    config = TrainerConfig(iterations=2, learning_rate=1e-3, stop_kl=10.0, stop_clip_fraction=1.0)
    update = update_checkpoint(parent, rows(), tmp_path / "v1", tuning=tuning, config=config)
    assert update.report.kl_after > 0
    model, _ = load_policy(tmp_path / "v1")
    assert next(model.parameters()).is_cuda and next(model.parameters()).dtype == torch.float32
    [reply] = reply_policy(str(tmp_path / "v1"))([[{"role": "user", "content": "m1 0.50"}]])
    assert isinstance(reply, str)

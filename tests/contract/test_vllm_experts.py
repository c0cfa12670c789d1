"""Adapters on the experts of a mixture: vLLM reads the weights that the trainer has written.

vLLM's kernels for them are for GPUs, so its CPU build loads such an adapter and cannot answer.
"""

import subprocess
from pathlib import Path

import pytest
import torch

from babylon.policies.load import load_policy
from babylon.serving.vllm.process_group import environment_of_others
from babylon.training.trainable import load_trainable, save_checkpoint
from tests.contract.engines import VLLM_PYTHON
from tests.tiny_policy import tiny_tokenizer
from tests.unit.training.grpo.architectures import architecture

pytestmark = pytest.mark.skipif(VLLM_PYTHON is None, reason="needs `make test-vllm`")


def test_vllm_reads_each_experts_weights_as_they_were_trained(tmp_path: Path) -> None:
    base, adapter, found = tmp_path / "base", tmp_path / "adapter", tmp_path / "found.pt"
    architecture("qwen3_moe").save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    trainable = load_trainable(base, "lora", 1e-3)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainable.tuned.items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    save_checkpoint(trainable, adapter)
    before, after = (load_policy(path)[0].model.layers[0].mlp.experts for path in (base, adapter))
    gate_up = (after.gate_up_proj - before.gate_up_proj).detach()
    down = (after.down_proj - before.down_proj).detach()
    script = Path(__file__).with_name("read_experts.py")
    subprocess.run(
        [str(VLLM_PYTHON), str(script), str(adapter), str(len(down)), str(found)],
        env=environment_of_others(),
        check=True,
        timeout=300,
    )
    gate, read_down, up = torch.load(found)
    torch.testing.assert_close(torch.cat([gate, up], 1), gate_up, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(read_down, down, atol=1e-6, rtol=1e-5)
    assert gate_up.abs().max() > 0.1

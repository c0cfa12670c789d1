"""The models that the checks load, by their bytes."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from babylon.core.probes import ProbeAnswer
from babylon.deployment.checks.likelihoods import Contenders, measure
from babylon.deployment.checks.probing import Probe
from babylon.training import likelihood
from babylon.training.trainable import TuningOptions, load_trainable, save_checkpoint
from tests.tiny_policy import save_tiny_policy

ANSWER = ProbeAnswer(
    prompt_token_ids=[1, 2, 3], token_ids=[4, 5, 258], logprobs=[-1.0] * 3, text="", ended=True
)
PROBES = [Probe(prompt=0, gateway="g", policy=ANSWER, champion=ANSWER)]


def adapter(base: Path, name: str, value: float) -> Path:
    made = load_trainable(base, "lora", 0.0, options=TuningOptions())
    for weight in made.tuned.values():
        torch.nn.init.constant_(weight, value)
    return save_checkpoint(made, base.parent / name)


@pytest.mark.parametrize(("precision", "bytes_a_weight"), [("bf16", 2), ("nf4", 0.7)])
def test_checks_of_an_adapter_load_its_base_as_the_trainer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, bytes_a_weight: float
) -> None:
    """Two adapters of one base, and the base: each in few bits but for adapter and head."""
    if precision == "nf4" and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    base = save_tiny_policy(tmp_path / "base", seed=1)
    policy, champion = adapter(base, "new", 0.02), adapter(base, "old", 0.01)
    sizes, load = list[Counter[str]](), likelihood.load_policy

    def counted(path: Any, **options: Any) -> Any:
        model, tokenizer = load(path, **options)
        held = Counter[str]()
        for name, weight in model.named_parameters():
            kind = "adapter" if "lora_" in name else name.partition(".")[0]
            kind = "layers" if ".layers." in name and kind == "model" else kind
            held[kind] += weight.nbytes
        sizes.append(held)
        return model, tokenizer

    monkeypatch.setattr(likelihood, "load_policy", counted)

    def measured(precision: Any) -> list[float]:
        contenders = Contenders(
            policy=str(policy),
            champion=str(champion),
            base=str(base),
            max_tokens=None,
            precision=precision,
        )
        found = measure(contenders, PROBES)
        assert len({tuple(found.own), *map(tuple, found.others.values())}) == 3
        return [*found.own, *found.others["champion"], *found.others["base"]]

    gaps = [abs(a - b) for a, b in zip(measured("fp32"), measured(precision), strict=True)]
    assert 0 < max(gaps) < (0.2 if precision == "bf16" else 2.0)
    exact, rough = sizes[:3], sizes[3:]
    for held in rough:
        assert held["layers"] <= exact[2]["layers"] / 4 * bytes_a_weight
        assert held["model"] == exact[2]["model"] / 2  # embeddings and the last norm
        assert held["lm_head"] == exact[2]["lm_head"]
    assert rough[0]["adapter"] == rough[1]["adapter"] > 0 == rough[2]["adapter"]

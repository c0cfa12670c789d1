"""Siblings on one base: each gene changes the update, and sharing the base changes nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import load_peft_weights

from babylon.core.learning_settings import PreferenceSettings, TrainingSettings
from babylon.training.population import shared_base
from babylon.training.population.genes import training_with
from babylon.training.resize_adapter import resized
from babylon.training.trainable import SharedBase, TuningOptions, load_trainable
from babylon.training.update import update_checkpoint
from babylon.training.update_options import preference_config, trainer_config, tuning_options
from tests.tiny_policy import save_tiny_policy
from tests.unit.training.test_update import logits, rows

BASIC = TrainingSettings(
    iterations=2, learning_rate=1e-3, warmup_steps=0, batch_size=1, accumulation=1, lora_rank=4
)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that an update has moved."""
    place = tmp_path_factory.mktemp("parent")
    base = save_tiny_policy(place / "base", seed=0)
    train(base, place / "v1", BASIC)
    return place / "v1"


def train(
    parent: Path, target: Path, training: TrainingSettings, base: SharedBase | None = None
) -> dict[str, torch.Tensor]:
    update_checkpoint(
        parent,
        rows(),
        target,
        tuning="lora",
        config=trainer_config(training, 0),
        options=tuning_options(training, resize=True),
        base=base,
    )
    return load_peft_weights(str(target))


@pytest.mark.parametrize(
    "genes",
    [
        {"learning_rate": 3e-3},
        {"kl_penalty": 0.5},
        {"clip": 0.05},
        {"iterations": 4},
        {"minibatch": 2},
        {"loss": "gspo"},
        {"rank": 8},
    ],
    ids=lambda genes: next(iter(genes)),
)
def test_each_gene_changes_the_update(parent: Path, tmp_path: Path, genes: dict[str, Any]) -> None:
    """From the same parent on the same rows."""
    # clips matter once ratios leave them, and further iterations while the update does not stop
    rate = 2e-3 if "clip" in genes else 1e-4
    training = BASIC.model_copy(update={"iterations": 3, "learning_rate": rate})
    train(parent, tmp_path / "plain", training)
    train(parent, tmp_path / "changed", training_with(training, genes))
    gap = (logits(tmp_path / "plain") - logits(tmp_path / "changed")).abs().max()
    assert gap > 1e-5


def test_siblings_of_several_processes_load_no_base_here(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process loads its own. One here would hold the memory of the first one's GPU."""
    loaded: list[Path | str] = []
    monkeypatch.setattr(SharedBase, "below", lambda place, _: loaded.append(place))
    monkeypatch.setattr(shared_base, "run_work", lambda work, base=None: (work, base))
    training = BASIC.model_copy(update={"processes": 2})
    work: Any = SimpleNamespace(settings=SimpleNamespace(training=training))
    assert shared_base.Siblings(str(parent)).train(work) == (work, None)
    assert loaded == []


def test_siblings_on_a_shared_base_are_those_that_load_their_own(
    parent: Path, tmp_path: Path
) -> None:
    settings = [
        BASIC,
        training_with(BASIC, {"learning_rate": 3e-3, "rank": 8}),
        training_with(BASIC, {"iterations": 3}),
    ]
    base = SharedBase.below(parent)
    frozen = {name: p.clone() for name, p in base.model.state_dict().items()}
    for number, training in enumerate(settings):
        own = train(parent, tmp_path / f"own-{number}", training)
        shared = train(parent, tmp_path / f"shared-{number}", training, base)
        base.restore()
        assert own.keys() == shared.keys()
        assert all(torch.equal(own[name], shared[name]) for name in own)
        assert base.model.state_dict().keys() == frozen.keys()
        assert all(torch.equal(v, frozen[n]) for n, v in base.model.state_dict().items())


@pytest.mark.parametrize("rank", [2, 4, 16])
def test_an_adapter_of_another_rank_computes_the_same_or_the_nearest(
    parent: Path, rank: int
) -> None:
    same = load_trainable(parent, "lora", 0.0).model
    options = TuningOptions(rank=rank, alpha=2 * rank, resize=True)
    other = load_trainable(parent, "lora", 0.0, options=options).model
    assert other.peft_config["default"].r == rank
    ids = torch.arange(40)[None]
    with torch.no_grad():
        gap = (same(input_ids=ids).logits - other(input_ids=ids).logits).abs().max()
        bare = same.unload()(input_ids=ids).logits
        moved = (bare - other(input_ids=ids).logits).abs().max()
    assert gap < (1e-4 if rank >= 4 else float(moved))


def test_a_smaller_rank_keeps_the_largest_singular_values() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(6, 20), torch.randn(30, 6)
    fresh = {"layer.lora_A.weight": torch.zeros(2, 20), "layer.lora_B.weight": torch.zeros(30, 2)}
    found = resized({"layer.lora_A.weight": a, "layer.lora_B.weight": b}, fresh)
    product = found["layer.lora_B.weight"] @ found["layer.lora_A.weight"]
    u, s, v = torch.linalg.svd(b @ a, full_matrices=False)
    torch.testing.assert_close(product, (u[:, :2] * s[:2]) @ v[:2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("out", "rank"), [(30, 0), (30, 1), (2, 6)])
def test_a_smaller_rank_leaves_no_dead_direction(out: int, rank: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(6, 20), torch.randn(out, rank) @ torch.randn(rank, 6)
    fresh = {"layer.lora_A.weight": torch.randn(4, 20), "layer.lora_B.weight": torch.zeros(out, 4)}
    found = resized({"layer.lora_A.weight": a, "layer.lora_B.weight": b}, fresh)
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in fresh.items()
    }
    assert found["layer.lora_A.weight"].norm(dim=1).min() > 0.1
    product = found["layer.lora_B.weight"] @ found["layer.lora_A.weight"]
    torch.testing.assert_close(product, b @ a, atol=1e-4, rtol=1e-4)


def test_the_settings_of_preferences_reach_the_trainer() -> None:
    options = preference_config(PreferenceSettings(loss="ipo", beta=0.3, nll=0.5, margin=2.0))
    assert (options.loss, options.beta, options.nll, options.margin) == ("ipo", 0.3, 0.5, 2.0)

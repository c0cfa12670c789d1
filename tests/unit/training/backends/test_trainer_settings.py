"""Every setting of the trainer reaches it."""

from contextlib import nullcontext
from dataclasses import replace
from typing import get_args

import pytest

from babylon.cli import main
from babylon.cli.training import TrainRequest
from babylon.core.learning_settings import (
    LOSSES_WITH_NORMALISER,
    LOSSES_WITH_RATIO,
    Loss,
    TrainingSettings,
)
from babylon.core.settings_loading import load_settings
from babylon.policies.load import Precision
from babylon.training.backends.own_trainer import update_torch
from babylon.training.backends.registry import updater
from babylon.training.grpo.advantage import Advantage, CallWeight
from babylon.training.grpo.config import MAX_STALENESS, TrainerConfig
from babylon.training.grpo.loss_inputs import Importance, LossBounds
from babylon.training.grpo.losses import LOSSES
from babylon.training.trainable import TuningOptions
from babylon.training.update_options import trainer_config, tuning_options

DEFAULT = TrainerConfig(target_kl=0.02)


def test_the_defaults_are_the_trainers_own() -> None:
    settings = load_settings()
    assert trainer_config(settings.training, settings.seed) == DEFAULT


@pytest.mark.parametrize(
    ("variable", "value", "changed"),
    [
        ("ITERATIONS", "3", {"iterations": 3}),
        ("BATCH_SIZE", "5", {"trajectories_per_step": 10}),
        ("GRADIENT_ACCUMULATION_STEPS", "3", {"trajectories_per_step": 12}),
        ("MAX_TOKENS", "512", {"max_tokens": 512}),
        ("LEARNING_RATE", "0.5", {"learning_rate": 0.5, "target_kl": None}),
        ("TUNING", "full", {"learning_rate": 1e-6}),
        ("WARMUP_STEPS", "0", {"warmup_steps": 0}),
        ("LOSS", "cispo", {"loss": "cispo"}),
        ("ADVANTAGE", "batch_std", {"advantage": "batch_std"}),
        ("CALL_WEIGHT", "token", {"call_weight": "token"}),
        ("KL_PENALTY", "0.25", {"kl_penalty": 0.25}),
        ("CREDIT", "trajectory", {"credit": "trajectory"}),
        ("DISCOUNT", "0.9", {"discount": 0.9}),
        ("ANCHOR_RATE", "0.5", {"anchor_rate": 0.5}),
        ("ENTROPY_FLOOR", "0.1", {"entropy_floor": 0.1}),
        ("STOP_KL", "0.06", {"stop_kl": 0.06, "target_kl": 0.04}),
        ("STOP_CLIP_FRACTION", "0.1", {"stop_clip_fraction": 0.1}),
        ("GRAD_CLIP", "0.5", {"grad_clip": 0.5}),
        ("CLIP_LOW", "0.7", {"bounds": LossBounds(clip_low=0.7)}),
        ("CLIP_HIGH", "1.2", {"bounds": LossBounds(clip_high=1.2)}),
        ("IMPORTANCE", "token_mask", {"bounds": LossBounds(importance="token_mask")}),
        ("MAX_STALENESS", "2", {"max_staleness": 2}),
        ("MAX_MISSING_LOGPROBS", "0.5", {"max_missing_logprobs": 0.5}),
        ("BABYLON_SEED", "4", {"seed": 4}),
    ],
)
def test_each_variable_changes_what_the_trainer_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, changed: dict[str, object]
) -> None:
    monkeypatch.setenv(variable, value)
    settings = load_settings()
    config = trainer_config(settings.training, settings.seed)
    told = {name: getattr(config, name) for name in TrainerConfig.__slots__}
    assert {n: v for n, v in told.items() if v != getattr(DEFAULT, n)} == changed


@pytest.mark.parametrize(
    ("variable", "value", "changed"),
    [
        ("LORA_RANK", "8", {"rank": 8, "alpha": 16}),
        ("LORA_ALPHA", "8", {"alpha": 8}),
        ("LORA_VARIANT", "dora", {"adapter": "dora"}),
        ("BASE_PRECISION", "bf16", {"base_precision": "bf16"}),
        ("OPTIMIZER", "adamw8bit", {"optimizer": "adamw8bit"}),
    ],
)
def test_each_variable_changes_the_form_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, changed: dict[str, object]
) -> None:
    assert tuning_options(load_settings().training) == TuningOptions()
    monkeypatch.setenv(variable, value)
    assert tuning_options(load_settings().training) == replace(TuningOptions(), **changed)  # type: ignore[arg-type]


def test_the_settings_know_what_the_trainer_knows() -> None:
    fields = TrainingSettings.model_fields
    assert set(get_args(Loss)) == set(LOSSES)
    assert set(LOSSES_WITH_NORMALISER) == {n for n, loss in LOSSES.items() if loss.call_weight}
    for name in LOSSES:
        refused = pytest.raises(ValueError, match="a ratio to the sampling policy of its own")
        with refused if name in LOSSES_WITH_RATIO else nullcontext():
            TrainerConfig(loss=name, bounds=LossBounds(importance="token_mask"))
    assert get_args(fields["advantage"].annotation) == get_args(Advantage)
    assert get_args(fields["call_weight"].annotation) == get_args(CallWeight)
    assert get_args(fields["importance"].annotation) == get_args(Importance)
    assert get_args(fields["base_precision"].annotation) == get_args(Precision)
    (limit,) = [rule.le for rule in fields["max_staleness"].metadata if hasattr(rule, "le")]
    assert limit == MAX_STALENESS


def test_torch_is_the_trainer_unless_another_is_chosen() -> None:
    assert updater(load_settings().training.trainer) is update_torch


def test_the_command_passes_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    handed: list[TrainRequest] = []

    def run(request: TrainRequest) -> None:
        handed.append(request)
        raise SystemExit(0)

    monkeypatch.setenv("BABYLON_HOME", str(tmp_path))
    monkeypatch.setattr("babylon.cli.training._run", run)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with pytest.raises(SystemExit):
        main(["train", "--trainer", "serverless", "--loss", "gspo"])
    assert handed[0].overrides == {"training": {"trainer": "serverless", "loss": "gspo"}}

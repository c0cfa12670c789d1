"""The options of an update that the settings describe."""

from babylon.core.learning_settings import PreferenceSettings, TrainingSettings
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.loss_inputs import LossBounds
from babylon.training.preferences.config import PreferenceConfig
from babylon.training.trainable import TuningOptions

PREFERENCES = PreferenceSettings()
_ROOM = 1.5  # an update stops at this many times its target


def trainer_config(
    training: TrainingSettings, seed: int, preferences: PreferenceSettings = PREFERENCES
) -> TrainerConfig:
    """The trainer's configuration that the settings describe."""
    return TrainerConfig(
        iterations=training.iterations,
        trajectories_per_step=training.batch_size * training.accumulation,
        max_tokens=training.max_tokens,
        activation_checkpointing=training.activation_checkpointing,
        learning_rate=training.effective_learning_rate,
        # a rate that was chosen stays as it is
        target_kl=training.stop_kl / _ROOM if training.learning_rate is None else None,
        warmup_steps=training.warmup_steps,
        loss=training.loss,
        advantage=training.advantage,
        credit=training.credit,
        discount=training.discount,
        call_weight=training.call_weight,
        kl_penalty=training.kl_penalty,
        anchor_rate=training.anchor_rate,
        entropy_floor=training.entropy_floor,
        router_loss=training.router_loss,
        words_weight=preferences.words,
        stop_kl=training.stop_kl,
        stop_clip_fraction=training.stop_clip_fraction,
        grad_clip=training.grad_clip,
        bounds=LossBounds(
            importance=training.importance,
            clip_low=training.clip_low,
            clip_high=training.clip_high,
        ),
        max_staleness=training.max_staleness,
        max_missing_logprobs=training.max_missing_logprobs,
        seed=seed,
    )


def preference_config(preferences: PreferenceSettings) -> PreferenceConfig:
    """The options of DPO and KTO that the settings describe."""
    return PreferenceConfig(
        loss=preferences.loss,
        beta=preferences.beta,
        nll=preferences.nll,
        margin=preferences.margin,
    )


def tuning_options(training: TrainingSettings, *, resize: bool = False) -> TuningOptions:
    """The adapter, precision and optimiser that the settings describe."""
    return TuningOptions(
        rank=training.lora_rank,
        alpha=training.lora_alpha or 2 * training.lora_rank,
        adapter=training.lora_variant,
        base_precision=training.base_precision,
        optimizer=training.optimizer,
        resize=resize,
    )

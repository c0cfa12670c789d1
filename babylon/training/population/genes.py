"""Genes: the settings of an update that evolve, with their bounds and their mutation.

A mutation is relative to the member's own value: a rate that works is rarely ten times another one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias, get_args

from babylon.core.errors import ConfigError
from babylon.core.learning_settings import PAIRS_ALONE, Loss, PreferenceSettings, TrainingSettings

Value: TypeAlias = float | int | str
Genes: TypeAlias = Mapping[str, Value]
_LEAST_CLIP = 0.05  # of CLIP_LOW, which is a ratio and therefore positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A number that mutates by a factor. ``zero``: it may be 0, and leaves 0 to ``low``."""

    low: float
    high: float
    integer: bool = False
    factor: float = 2.0  # largest
    zero: bool = False

    def mutated(self, value: Value, rng: Random) -> Value:
        """Another value within the bounds."""
        now = float(value)
        if self.zero and now == 0:
            return self.low
        up = now < self.high and (now <= self.low or rng.random() < 0.5)
        if self.zero and not up and now / 1.2 < self.low:
            return 0.0
        step = rng.uniform(math.log(1.2), math.log(self.factor))
        found = min(self.high, max(self.low, now * math.exp(step if up else -step)))
        if not self.integer:
            return found
        whole = round(found)
        return whole if whole != value else int(now) + (1 if up else -1)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some values; ``ordered`` ones mutate to a neighbour."""

    values: tuple[Value, ...]
    ordered: bool = False

    def mutated(self, value: Value, rng: Random) -> Value:
        """Another of the values."""
        if not self.ordered or value not in self.values:
            return rng.choice([one for one in self.values if one != value])
        place = self.values.index(value)
        near = [p for p in (place - 1, place + 1) if 0 <= p < len(self.values)]
        return self.values[rng.choice(near)]


GENES: dict[str, Scale | OneOf] = {
    "learning_rate": Scale(low=1e-7, high=1e-2, factor=3.0),
    "kl_penalty": Scale(low=0.01, high=0.5, zero=True),
    "clip": Scale(low=0.05, high=0.8),
    "iterations": Scale(low=1, high=40, integer=True),
    "minibatch": Scale(low=2, high=64, integer=True),
    "temperature": Scale(low=0.5, high=1.5, factor=1.4),
    "loss": OneOf(get_args(Loss)),
    "rank": OneOf((4, 8, 16, 32, 64), ordered=True),
}


def chosen_genes(text: str, training: TrainingSettings) -> tuple[str, ...]:
    """The genes that ``POPULATION_GENES`` names, without ``kl_penalty`` if nothing reads it.

    Raises:
        ConfigError: an unknown gene, one that the objective never reads, or one that contradicts
            another setting.
    """
    unread = ("kl_penalty",) if training.objective in PAIRS_ALONE else ()
    stripped = (name.strip() for name in text.split(","))
    names = tuple(name for name in stripped if name and name not in unread)
    if unknown := [name for name in names if name not in GENES]:
        raise ConfigError(
            f"POPULATION_GENES names {', '.join(unknown)}: choose from {', '.join(GENES)}"
        )
    if not names:
        raise ConfigError("POPULATION_GENES names no gene: name at least one")
    if "temperature" in names and "dpo" not in training.objective.split("+"):
        raise ConfigError(
            f"POPULATION_GENES names temperature, at which replies are sampled, and OBJECTIVE="
            f"{training.objective} samples none: leave it out, or set OBJECTIVE=dpo"
        )
    bound = {"CALL_WEIGHT": training.call_weight, "IMPORTANCE": training.importance}
    own = [name for name, value in bound.items() if value not in ("trajectory", "token_truncate")]
    if "loss" in names and own:
        raise ConfigError(
            f"POPULATION_GENES names loss, and {own[0]}={bound[own[0]]} does not fit every loss:"
            f" leave it out, or unset {own[0]}"
        )
    return names


def genes_of(
    names: Sequence[str], training: TrainingSettings, preferences: PreferenceSettings, rate: float
) -> dict[str, Value]:
    """The present settings as genes. ``rate``: the learning rate, if the settings leave it open."""
    own: dict[str, Value] = {
        "learning_rate": training.learning_rate or rate,
        "kl_penalty": training.kl_penalty,
        "clip": training.clip_high - 1,
        "iterations": training.iterations,
        "minibatch": training.batch_size * training.accumulation,
        "temperature": preferences.temperature,
        "loss": training.loss,
        "rank": training.lora_rank,
    }
    return {name: own[name] for name in names}


def training_with(training: TrainingSettings, genes: Genes) -> TrainingSettings:
    """The settings with the genes in force. Settings without a gene stay as they are."""
    changes: dict[str, Any] = {
        name: genes[name]
        for name in ("learning_rate", "kl_penalty", "iterations", "loss")
        if name in genes
    }
    if "clip" in genes:
        width, before = float(genes["clip"]), training.clip_high - 1
        changes["clip_high"] = 1 + width
        if before:  # in proportion
            low = 1 - width * (1 - training.clip_low) / before
            changes["clip_low"] = max(low, min(_LEAST_CLIP, training.clip_low))
    if "minibatch" in genes:
        changes |= {"batch_size": genes["minibatch"], "accumulation": 1}
    if "rank" in genes:
        scale = (training.lora_alpha or 2 * training.lora_rank) / training.lora_rank
        changes |= {"lora_rank": genes["rank"], "lora_alpha": scale * int(genes["rank"])}
    return TrainingSettings(**{**dict(training), **changes})


def preferences_with(preferences: PreferenceSettings, genes: Genes) -> PreferenceSettings:
    """The settings of sampling with the genes in force."""
    if "temperature" not in genes:
        return preferences
    return PreferenceSettings(**{**dict(preferences), "temperature": genes["temperature"]})

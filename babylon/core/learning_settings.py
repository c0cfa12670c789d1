"""Settings of learning beyond scores: preferences, words, and populations of settings."""

from typing import Literal

from babylon.core.settings_group import Group, env

Precision = Literal["fp32", "bf16", "nf4"]
Objective = Literal["grpo", "dpo", "kto", "sdpo", "grpo+dpo", "grpo+sdpo"]


class PreferenceSettings(Group):
    """Replies that are sampled after a window, and what is learnt from pairs of them."""

    prompts: int = env(64, "PREFERENCE_PROMPTS", ge=1)
    """Number of a window's prompts that are answered again: those whose answers disagreed most."""
    replies: int = env(4, "PREFERENCE_REPLIES", ge=2, le=64)
    """Number of replies that the champion gives to each of these prompts."""
    temperature: float = env(1.0, "PREFERENCE_TEMPERATURE", ge=0.1, le=2)
    """Temperature at which they are sampled."""
    values: Literal["simulator", "judge"] = env("simulator", "PREFERENCE_VALUES")
    """Source of a reply's value: play in the simulator, in dollars, or the judge's score."""
    margin: float = env(0.0, "PREFERENCE_MARGIN", ge=0)
    """Difference of two replies' values that a pair must exceed."""
    loss: Literal["sigmoid", "ipo", "sigmoid_norm"] = env("sigmoid", "DPO_LOSS")
    """Loss of a pair: DPO's, IPO's, or DPO's for each token."""
    beta: float = env(0.1, "PREFERENCE_BETA", gt=0)
    """Weight of the distance from the policy before the update, in DPO and KTO."""
    nll: float = env(0.0, "DPO_NLL", ge=0)
    """Weight of the better reply's negative log-likelihood."""
    words: float = env(0.1, "SDPO_WEIGHT", gt=0)
    """Weight of the words in `grpo+sdpo`: that of a nat, relative to the mean size of an
    advantage."""


class PopulationSettings(Group):
    """Several settings of an update side by side; the best of them go on."""

    size: int = env(1, "POPULATION", ge=1, le=64)
    """Number of siblings that a window yields, each trained by its own settings. 1: none."""
    evolve_every: int = env(3, "EVOLVE_EVERY", ge=1)
    """Number of windows after which the settings evolve."""
    worlds: int = env(128, "POPULATION_WORLDS", ge=16)
    """Number of games by which siblings are compared. None of them is the gate's."""
    elites: int = env(1, "POPULATION_ELITES", ge=1)
    """Number of the best settings that go on unchanged."""
    genes: str = env("learning_rate,kl_penalty,clip,iterations,minibatch", "POPULATION_GENES")
    """Settings that evolve, separated by commas; also `temperature`, `loss` and `rank`."""


def reading_precision(tuning: str, base_precision: Precision) -> Precision:
    """Precision of frozen weights where a policy is read: that in which the trainer has them.

    Weights that are all tuned are fp32 in the trainer.
    """
    return base_precision if tuning == "lora" else "fp32"

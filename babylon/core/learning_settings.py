"""Settings of learning: the update, preferences and words, and populations of settings."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from babylon.core.settings_group import Group, env

Precision = Literal["fp32", "bf16", "nf4"]
Objective = Literal["grpo", "dpo", "kto", "sdpo", "grpo+dpo", "grpo+sdpo"]
Trainer = Literal["torch", "serverless", "art-local"]
Loss = Literal["ppo_clip", "cispo", "gspo", "gspo_token", "sapo", "dapo", "dr_grpo", "reinforce_is"]
PAIRS_ALONE = ("dpo", "kto")  # objectives that never read the scores' loss and its reference
LOSSES_WITH_NORMALISER = ("gspo", "gspo_token", "dapo", "dr_grpo")
LOSSES_WITH_RATIO = ("cispo", "reinforce_is", "gspo")  # of their own, to the sampling policy


class TrainingSettings(Group):
    trainer: Trainer = env("torch", "TRAINER")
    """Backend that computes the update: our own, W&B's service, or ART on this machine."""
    objective: Objective = env("grpo", "OBJECTIVE")
    """Source of an update: scores (`grpo`), pairs of replies sampled for it (`dpo`), logged
    calls as good or bad ones (`kto`), feedback in words (`sdpo`), or two of them;
    docs/preferences.md.
    """
    tuning: Literal["lora", "full"] = env("lora", "TUNING")
    """Weights that are trained: a LoRA adapter, or all of them."""
    transfer_layers: Literal["all", "attention", "ffn"] = env("all", "TRANSFER_LAYERS")
    """Layers that are trained."""
    loss: Loss = env("ppo_clip", "LOSS")
    """Loss function; docs/trainer.md has the formulas."""
    advantage: Literal["leave_one_out", "group_std", "batch_std"] = env(
        "leave_one_out", "ADVANTAGE"
    )
    """Baseline and scale of advantages; docs/trainer.md explains them."""
    credit: Literal["trajectory", "decision"] = env("decision", "CREDIT")
    """Unit that is compared: whole trajectories, or each decision with those of the other agents at
    the same tick, if the scorer gives steps rewards.
    """
    discount: float = env(0.0, "DISCOUNT", ge=0, le=1)
    """Discount of the rewards of later steps in a decision's return, for each step."""
    call_weight: Literal["trajectory", "token", "trajectory_tokens", "call", "constant"] = env(
        "trajectory", "CALL_WEIGHT"
    )
    """What has equal weight in a train step: each trajectory, token or call. Losses with a
    normaliser of their own take only the default.
    """
    learning_rate: float | None = env(None, "LEARNING_RATE", gt=0)
    """Learning rate of AdamW. Unset: it starts with a rate for the model's size, and adapts until
    an update moves the policy by two thirds of `STOP_KL`. Other trainers take 1e-5 (LoRA) or 1e-6
    (full).
    """
    warmup_steps: int = env(10, "WARMUP_STEPS", ge=0)
    """Number of train steps in which the learning rate rises, once for an optimiser."""
    iterations: int = env(10, "ITERATIONS", ge=1)
    """Number of passes over a window."""
    batch_size: int = env(4, "BATCH_SIZE", ge=1)
    """Number of trajectories in a micro-batch."""
    accumulation: int = env(2, "GRADIENT_ACCUMULATION_STEPS", ge=1)
    """Number of micro-batches in a train step."""
    max_tokens: int | None = env(None, "MAX_TOKENS", ge=1)
    """Tokens computed at once. It decides memory, never the result, and is halved when memory is
    short. Unset: a number that fits the model and the device.
    """
    activation_checkpointing: bool = env(False, "ACTIVATION_CHECKPOINTING")
    """Recompute activations in the backward pass: less memory, a third more time. It is switched on
    when memory runs out repeatedly.
    """
    processes: int = env(1, "TRAIN_PROCESSES", ge=0)
    """Number of processes of a machine that share an update of TRAINER=torch. 0: one a GPU."""
    nodes: int = env(1, "TRAIN_NODES", ge=1)
    """Number of machines that share an update, with `TRAIN_PROCESSES` each."""
    rendezvous: str | None = env(None, "TRAIN_RENDEZVOUS", pattern=r"^[\w.-]+:\d+$")
    """`host:port` of the machine whose worker runs the update, where the other machines meet it."""
    kl_penalty: float = env(0.0, "KL_PENALTY", ge=0)
    """Weight of the KL divergence to an anchor, which follows the policy slowly, in the loss."""
    anchor_rate: float = env(0.1, "ANCHOR_RATE", ge=0, le=1)
    """Fraction of the distance to the policy that the anchor moves after each update. 0: the anchor
    stays; 1: it is the policy that an update starts from.
    """
    entropy_floor: float = env(0.0, "ENTROPY_FLOOR", ge=0)
    """Entropy, in nats a token, below which a reply gets an entropy bonus. 0: no bonus."""
    router_loss: float = env(0.0, "ROUTER_AUX_LOSS", ge=0)
    """Weight of the loss that keeps the experts of a mixture equally busy. It costs a pass, and
    needs one process.
    """
    importance: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = env(
        "token_truncate", "IMPORTANCE"
    )
    """Correction for calls that another policy sampled: importance weights of tokens or of whole
    calls, truncated at a bound or masked beyond it. Losses with a correction of their own take only
    the default.
    """
    clip_low: float = env(0.8, "CLIP_LOW", gt=0, le=1)
    """Ratio of policies below which a bad token is not pushed further."""
    clip_high: float = env(1.28, "CLIP_HIGH", ge=1)
    """Ratio of policies above which a good token is not pushed further."""
    stop_kl: float = env(0.03, "STOP_KL", gt=0)
    """KL divergence from the policy before the update, in nats a token, after which no further pass
    begins. A pass beyond twice as much is undone.
    """
    stop_clip_fraction: float = env(0.3, "STOP_CLIP_FRACTION", gt=0, le=1)
    """The same bound for the share of tokens whose ratio is clipped."""
    grad_clip: float = env(1.0, "GRAD_CLIP", gt=0)
    """Largest norm of a train step's gradient; a larger gradient is scaled down to it."""
    lora_rank: int = env(16, "LORA_RANK", ge=1)
    """Rank of a new adapter. vLLM takes more than 16 with `--max-lora-rank` in `VLLM_ARGS`."""
    lora_alpha: float | None = env(None, "LORA_ALPHA", gt=0)
    """Scale of a new adapter, times its rank. Unset: twice the rank."""
    lora_variant: Literal["lora", "rslora", "dora"] = env("lora", "LORA_VARIANT")
    """Form of a new adapter: scaled by the rank, its root, or `dora`, which vLLM does not serve."""
    base_precision: Literal["fp32", "bf16", "nf4"] = env("fp32", "BASE_PRECISION")
    """Precision of the frozen weights below an adapter. nf4, 4 bits, needs bitsandbytes."""
    optimizer: Literal["adamw", "adamw8bit"] = env("adamw", "OPTIMIZER")
    """AdamW, or the same with moments in 8 bits, which needs bitsandbytes."""
    max_missing_logprobs: float = env(1.0, "MAX_MISSING_LOGPROBS", ge=0, le=1)
    """Share of calls without logged logprobs above which a window is not trained."""
    max_staleness: int = env(1, "MAX_STALENESS", ge=0, le=2)
    """Number of updates that a call's policy may lie behind; nothing corrects for more than two."""
    recall_chats: Path | None = env(None, "RECALL_CHATS")
    """File of chats that a policy must not forget, in any format of `db import`; docs/arena.md."""

    @model_validator(mode="after")
    def _the_objective_reads_what_is_set(self) -> Self:
        own = {"KL_PENALTY": self.kl_penalty, "ENTROPY_FLOOR": self.entropy_floor}
        for name, value in own.items():
            if value and self.objective in PAIRS_ALONE:
                raise ValueError(
                    f"{name}={value:g} with OBJECTIVE={self.objective}, whose only reference is the"
                    " policy before the update: unset it, or take an objective with grpo"
                )
        return self

    @model_validator(mode="after")
    def _the_loss_takes_the_call_weight(self) -> Self:
        if self.loss in LOSSES_WITH_NORMALISER and self.call_weight != "trajectory":
            raise ValueError(
                f"CALL_WEIGHT={self.call_weight!r} with LOSS={self.loss!r}, which is defined with a"
                " normaliser of its own: unset CALL_WEIGHT, or take LOSS=ppo_clip"
            )
        return self

    @model_validator(mode="after")
    def _the_loss_takes_the_importance(self) -> Self:
        if self.loss in LOSSES_WITH_RATIO and self.importance != "token_truncate":
            raise ValueError(
                f"IMPORTANCE={self.importance!r} with LOSS={self.loss!r}, which is defined with a"
                " correction of its own: unset IMPORTANCE, or take LOSS=ppo_clip"
            )
        return self

    @model_validator(mode="after")
    def _the_routers_loss_is_of_one_process(self) -> Self:
        if self.router_loss and (self.processes > 1 or self.nodes > 1):
            raise ValueError(
                f"ROUTER_AUX_LOSS={self.router_loss:g} with TRAIN_PROCESSES={self.processes} and"
                f" TRAIN_NODES={self.nodes}: it needs one process, so set both to 1, or unset it"
            )
        return self

    @property
    def effective_learning_rate(self) -> float:
        """The original's defaults: 1e-6 for full fine-tuning, 1e-5 for LoRA."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-6 if self.tuning == "full" else 1e-5


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

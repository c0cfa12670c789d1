"""The trainer's options, with their units and defaults."""

from dataclasses import dataclass, field
from typing import Literal

from babylon.training.grpo.advantage import Advantage, CallWeight
from babylon.training.grpo.loss_inputs import LossBounds
from babylon.training.grpo.losses import LOSSES

Credit = Literal["trajectory", "decision"]
_OWN_IMPORTANCE = {"cispo", "reinforce_is", "gspo"}
MAX_STALENESS = 2  # versions; upper bound of max_staleness, importance weights fail beyond it


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Options of an update.

    ``warmup_steps`` matches the memory of Adam's first moment, ``1 / (1 - 0.9)``. Earlier steps
    would have full size in a direction that few gradients determine.

    With ``target_kl`` the learning rate is the first one of an optimiser's life. It rises while the
    policy moves less than that, and falls while it moves more.

    Raises:
        ValueError: an option has an invalid value, or contradicts another.
    """

    iterations: int = 10
    trajectories_per_step: int = 8
    max_tokens: int | None = None  # of a portion; None: forward.portion_tokens
    activation_checkpointing: bool = False  # a third more time for less memory
    learning_rate: float = 1e-5
    target_kl: float | None = None  # of an update, as stop_kl; None: the learning rate is fixed
    warmup_steps: int = 10  # once an optimiser, not once a window
    grad_clip: float = 1.0
    loss: str = "ppo_clip"
    bounds: LossBounds = field(default_factory=LossBounds)
    advantage: Advantage = "leave_one_out"
    credit: Credit = "decision"
    discount: float = 0.0  # of later steps' rewards, with credit "decision"
    call_weight: CallWeight = "trajectory"
    kl_penalty: float = 0.0  # weight of the divergence from the reference
    anchor_rate: float = 0.1  # of the reference's way to the policy, after each update
    entropy_floor: float = 0.0  # nats a token; calls below it are made more varied
    router_loss: float = 0.0  # weight of the loss that keeps a mixture's experts equally busy
    entropy_weight: float = 0.3  # of that term, relative to the mean size of an advantage
    words_weight: float = 0.1  # of a teacher's nat, relative to the mean size of an advantage
    stop_kl: float = 0.03  # nats a token, k3(p || theta)
    stop_clip_fraction: float = 0.3
    undo_factor: float = 2.0  # an iteration that exceeds a stop's bound by this factor is undone
    max_staleness: int = 1  # versions between a call's policy and the parent, at most
    max_missing_logprobs: float = 1.0  # share of calls without mu, at most
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"unknown loss {self.loss!r}: there are {', '.join(LOSSES)}")
        fixed = LOSSES[self.loss].call_weight
        if fixed is not None and self.call_weight != "trajectory":
            raise ValueError(
                f"call_weight {self.call_weight!r} with loss {self.loss!r}, which has a normaliser"
                " of its own: keep the default call_weight, or use ppo_clip"
            )
        if self.bounds.importance != LossBounds().importance and self.loss in _OWN_IMPORTANCE:
            raise ValueError(
                f"importance {self.bounds.importance!r} with loss {self.loss!r}, whose definition"
                " has a ratio to the sampling policy of its own: use ppo_clip, dapo or sapo"
            )
        for name in ("iterations", "trajectories_per_step", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        for name in ("discount", "anchor_rate"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {share}: it must be from 0 to 1")
        for name in (
            "warmup_steps",
            "max_staleness",
            "kl_penalty",
            "entropy_floor",
            "router_loss",
            "words_weight",
        ):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}: it must not be negative")

    @property
    def kl_limit(self) -> float:
        """Divergence from the parent beyond which an iteration is undone, and an update is bad."""
        return self.undo_factor * self.stop_kl

    @property
    def normaliser(self) -> CallWeight:
        """The divisor of a train step's loss: the loss's own, else ``call_weight``."""
        return LOSSES[self.loss].call_weight or self.call_weight

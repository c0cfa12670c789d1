"""The options of learning from preferences, beside those of every update (``TrainerConfig``)."""

from dataclasses import dataclass
from typing import Literal

PairLoss = Literal["sigmoid", "ipo", "sigmoid_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """Options of DPO and KTO.

    ``beta`` is the weight of the distance from the policy that the update starts from; for ``ipo``
    the inverse of twice the margin that is asked for, a token. ``margin`` is the least difference
    of two replies' values that makes a pair.

    Raises:
        ValueError: an option has an invalid value.
    """

    loss: PairLoss = "sigmoid"
    beta: float = 0.1
    nll: float = 0.0  # weight of the better reply's negative log-likelihood, nats a token
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}: it must be positive")
        for name in ("nll", "margin"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}: it must not be negative")

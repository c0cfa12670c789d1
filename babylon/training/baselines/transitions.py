"""Recorded play as transitions for offline algorithms."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from babylon.game.envs.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transitions:
    """N steps. ``rewards`` are payoffs in hundreds of dollars, ``codes`` those of the menu."""

    observations: Observation  # [N, features]
    codes: NDArray[np.int64]  # [N]
    rewards: NDArray[np.float32]  # [N]
    following: Observation  # [N, features]; after a play's last step, of no use
    ends: NDArray[np.float32]  # [N] 1: the play's last step

    def batch(self) -> Any:
        """Return the steps as agilerl's replay buffer takes them."""
        import torch
        from agilerl.components.data import Transition, transition_to_tensordict

        found = transition_to_tensordict(
            Transition(
                obs=self.observations,
                action=self.codes,
                reward=self.rewards,
                next_obs=self.following,
                done=self.ends,
            )
        )
        found.batch_size = torch.Size([len(self.codes)])
        return found

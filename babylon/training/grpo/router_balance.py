"""The routers' auxiliary loss, which keeps a mixture's experts about equally busy.

With E experts, f_e the share of routed tokens that expert e gets (a token with k experts counts k
times) and P_e the mean of its router's probability, over all tokens of all calls and all layers:

    L = E * sum_e f_e P_e

(Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, eq. 4 to 6; transformers'
``load_balancing_loss_func``). f has no gradient. It is counted in a pass of its own over the train
step; the loss is then a sum over tokens, so it does not depend on the cut into portions. A token
that several calls share counts once for each of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class RouterLossError(ValueError):
    """The routers' loss has no form for this model, or for several processes."""


@dataclass(slots=True, kw_only=True)
class RouterBalance:
    """The routers of a model, and the load of its experts in a train step.

    ``load`` ``[E]`` are the tokens that each expert got, ``rows`` the tokens that were routed.
    """

    routers: Sequence[tuple[nn.Module, int]]  # module, and the place of the logits in its output
    experts: int
    active: int  # experts of a token
    weight: float
    load: Tensor
    rows: float = 0.0
    counting: bool = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context of the pass that counts a train step's load anew."""
        self.load, self.rows, self.counting = torch.zeros_like(self.load), 0.0, True
        try:
            yield
        finally:
            self.counting = False

    @contextmanager
    def watch(self) -> Iterator[list[Tensor]]:
        """Collect the routers' probabilities ``[N, E]`` while the block runs, layer by layer."""
        found: list[Tensor] = []

        def note(place: int, output: Tensor | tuple[Tensor, ...]) -> None:
            logits = output[place] if isinstance(output, tuple) else output
            found.append(logits.reshape(-1, self.experts).float().softmax(-1))

        hooks = [
            router.register_forward_hook(lambda _, __, output, place=place: note(place, output))
            for router, place in self.routers
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def count(self, found: Sequence[Tensor], calls: Tensor) -> None:
        """Add a portion's tokens to the load. ``calls`` ``[N]``: calls that share each token."""
        weights = calls.to(self.load.dtype)
        for probabilities in found:
            chosen = probabilities.topk(self.active, dim=-1).indices
            self.load.scatter_add_(0, chosen.flatten(), weights.repeat_interleave(self.active))
            self.rows += float(weights.sum())

    def loss(self, found: Sequence[Tensor], calls: Tensor) -> Tensor:
        """The portion's part of the weighted loss, by the load of the whole step."""
        mean = self.load / self.rows
        total = torch.stack([(calls[:, None] * one).sum(0) for one in found]).sum(0)
        return self.weight * self.experts * (mean * total).sum() / self.rows


def router_balance(backbone: nn.Module, weight: float) -> RouterBalance:
    """The balance of a model's routers.

    Raises:
        RouterLossError: the model has no routers whose logits transformers records.
    """
    recorder = (getattr(backbone, "_can_record_outputs", None) or {}).get("router_logits")
    config: Any = getattr(backbone, "config", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if recorder is None or not experts:
        raise RouterLossError(
            f"ROUTER_AUX_LOSS={weight:g}, but {type(backbone).__name__} has no routers with an"
            " auxiliary loss: set it to 0"
        )
    place = getattr(recorder, "index", 0)
    kind = getattr(recorder, "target_class", recorder)
    routers = [(module, place) for module in backbone.modules() if isinstance(module, kind)]
    device = next(backbone.parameters()).device
    return RouterBalance(
        routers=routers,
        experts=int(experts),
        active=int(config.num_experts_per_tok),
        weight=weight,
        load=torch.zeros(int(experts), device=device),
    )

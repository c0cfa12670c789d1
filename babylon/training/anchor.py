"""The reference of a KL penalty: an anchor that follows the policy slowly.

    anchor' = (1 - rate) anchor + rate theta         tuned weights, once an update

The penalty pulls a policy back to where it was about ``1 / rate`` updates ago. A fixed reference
(rate 0) stops learning once the policy has moved as far as the penalty allows; the parent itself
(rate 1) would only slow it down. Source: WARP (Ramé et al. 2024, arXiv 2406.16768, section 3.1).

The anchor is saved in the checkpoint. A policy that is not promoted takes its anchor with it. A
line without one, or with one that cannot be read, begins with its parent's weights. A rank of
several holds its part of the anchor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from babylon.training.damaged import damage_logged
from babylon.training.grpo.shards import collected, divided, local
from babylon.training.trainable import Trainable

ANCHOR_FILE = "anchor.pt"


def load_anchor(trainable: Trainable, parent: Path | str) -> dict[str, Tensor]:
    """Return the parent's anchor: name of a tuned weight → this rank's part, on the host."""
    path = Path(parent) / ANCHOR_FILE
    tuned = trainable.tuned
    now = {name: local(weight.detach()).cpu().clone() for name, weight in tuned.items()}
    saved: dict[str, Tensor] = {}
    if path.exists():
        with damage_logged(path, "the anchor begins with the parent"):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    return {
        name: local(divided(saved[name], tuned[name])).cpu()
        if name in saved and saved[name].shape == tuned[name].shape
        else value
        for name, value in now.items()
    }


@contextmanager
def in_force(trainable: Trainable, anchor: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the model has the anchor's weights."""
    own = {name: local(weight.detach()).clone() for name, weight in trainable.tuned.items()}
    _set(trainable, anchor)
    try:
        yield
    finally:
        _set(trainable, own)


def moved(
    anchor: Mapping[str, Tensor], trainable: Trainable, rate: float, *, first: bool
) -> dict[str, Tensor]:
    """Return the anchor of the next update, to the ``first`` of the ranks that call this."""

    def of(value: Tensor, weight: Tensor) -> Tensor:
        part = torch.lerp(value, local(weight.detach()).to(value), rate)
        return collected(part, weight, first=first)

    return {name: of(value, trainable.tuned[name]) for name, value in anchor.items()}


def _set(trainable: Trainable, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in trainable.tuned.items():
            local(weight).copy_(weights[name])

"""The ranks of an update over ``torch.distributed``: NCCL between GPUs, gloo between CPUs.

Gradients are summed once a train step, after all portions, because ranks have different numbers of
portions and some have none. ``DistributedDataParallel`` sums during the backward pass of each
forward pass, which needs equal numbers on all ranks.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")
# One rank may bring a base model or send the progress while the others wait. A rank that dies is
# noticed at once: torchrun ends the others.
LONGEST_WAIT = timedelta(hours=12)
_BUCKET = 2**26  # values that one message sums: 256 MiB of fp32


class TorchRanks:
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def add(self, values: Tensor) -> None:
        """Replace ``values`` on every rank by their sum over all ranks, equal bit for bit."""
        dist.all_reduce(values)

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each ``.grad`` by its sum over all ranks. None counts as zeros.

        FSDP2 has summed those of sharded parameters in the backward passes.
        """
        for bucket in _buckets([p for p in parameters if not isinstance(p, DTensor)]):
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            parts = torch.split(flat, [grad.numel() for grad in grads])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)

    def most(self, count: int) -> int:
        """The largest ``count`` of all ranks."""
        value = torch.tensor(count, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def from_first(self, value: T | None) -> T:
        """The value that the first rank gives."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        assert values[0] is not None
        return values[0]

    @property
    def several_machines(self) -> bool:
        """Whether not all ranks are on this machine."""
        return self.size > int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @property
    def first_here(self) -> bool:
        """Whether this rank is the first one on its machine."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.most(0)


@contextmanager
def joined_ranks() -> Iterator[TorchRanks]:
    """Join the group that torchrun describes in the environment, with one GPU for each process."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kind, timeout=LONGEST_WAIT)
    try:
        yield TorchRanks()
    finally:
        dist.destroy_process_group()


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    bucket: list[torch.nn.Parameter] = []
    for parameter in parameters:
        values = sum(p.numel() for p in bucket) + parameter.numel()
        if bucket and (values > _BUCKET or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket

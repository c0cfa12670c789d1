"""The number of threads with which a model is trained on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NARROW = 256  # hidden size


@contextmanager
def fitting_threads(width: int) -> Iterator[None]:
    """Train a narrow model with one thread, unless ``OMP_NUM_THREADS`` decides.

    Threads sleep between operations (``core.openmp``). In a model whose hidden size ``width`` is at
    most ``NARROW``, they take longer to wake up than their share of an operation takes.
    """
    if width > NARROW or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

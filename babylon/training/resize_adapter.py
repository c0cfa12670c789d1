"""An adapter of another rank that computes the same, or what is nearest to it.

A larger rank keeps the product ``B A`` of each layer exactly: the new rows of ``A`` are random, and
the new columns of ``B`` are zero. A smaller one keeps its largest singular values (Eckart and Young
1936), found in the small matrices of two QR decompositions. Where fewer are left than the rank, a
direction with both halves near zero would have almost no gradient: it begins as a new one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_A, _B = ".lora_A.weight", ".lora_B.weight"


def resized(saved: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of ``saved`` in the shapes of ``fresh``, a new adapter on the same layers.

    The scale of both adapters must be the same.
    """
    result = dict(fresh)
    for name in fresh:
        if not name.endswith(_A):
            continue
        layer = name.removesuffix(_A)
        if name in saved:
            a, b = saved[name].float(), saved[layer + _B].float()
            result[name], result[layer + _B] = _pair(a, b, fresh[name])
    return result


def _pair(a: Tensor, b: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """``A`` ``[r, in]`` and ``B`` ``[out, r]`` with as many rows and columns as ``fresh``."""
    rank, wanted = len(a), len(fresh)
    if wanted >= rank:
        more = fresh[rank:].to(a)
        return torch.cat([a, more]), torch.nn.functional.pad(b, (0, wanted - rank))
    left, r_left = torch.linalg.qr(b)
    right, r_right = torch.linalg.qr(a.T)
    u, s, v = torch.linalg.svd(r_left @ r_right.T)
    rounding = s[0] * torch.finfo(s.dtype).eps * max(len(b), a.shape[1])
    kept = int((s[:wanted] > rounding).sum())
    root = s[:kept].sqrt()
    a, b = (root[:, None] * v[:kept]) @ right.T, (left @ u[:, :kept]) * root
    return torch.cat([a, fresh[kept:].to(a)]), torch.nn.functional.pad(b, (0, wanted - kept))

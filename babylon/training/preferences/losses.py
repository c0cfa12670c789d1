"""The losses of preferences: pure functions of the log-probabilities of whole replies.

All of them read ``theta`` and ``reference`` ``[C]``: the sums of a reply's token logprobs under the
policy in training and under the policy that the update started from. A reply's token logprobs have
therefore one common gradient, ``d loss / d theta_c``.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from babylon.training.preferences.config import PreferenceConfig


def pair_loss(
    theta: Tensor,
    reference: Tensor,
    lengths: Tensor,
    pairs: Tensor,
    config: PreferenceConfig,
) -> Tensor:
    """DPO: the mean loss of P pairs.

    ``sigmoid``: ``-log sigmoid(beta (d_w - d_l))`` with ``d = theta - reference`` (Rafailov et al.
    2023, arXiv 2305.18290, eq. 7). ``sigmoid_norm``: the same with ``d`` a token, so that long
    replies do not win by their length (as SimPO, arXiv 2405.14734, with a reference). ``ipo``:
    ``(d_w - d_l - 1 / (2 beta))^2``, ``d`` a token (Azar et al. 2023, arXiv 2310.12036, eq. 17).
    ``nll`` adds the better reply's negative log-likelihood a token, so that it does not become
    unlikely together with the worse one (RPO, arXiv 2404.19733, eq. 1).

    Args:
        lengths: tokens of each reply, ``[C]``.
        pairs: ``[P, 2]``, the better and the worse reply.
    """
    moved = theta - reference
    if config.loss != "sigmoid":  # only DPO's own loss is of whole replies
        moved = moved / lengths
    better, worse = pairs.unbind(-1)
    margin = moved[better] - moved[worse]
    if config.loss == "ipo":
        loss = (margin - 1 / (2 * config.beta)) ** 2
    else:
        loss = -logsigmoid(config.beta * margin)
    return (loss - config.nll * theta[better] / lengths[better]).mean()


def unpaired_loss(
    theta: Tensor,
    reference: Tensor,
    mismatch: Tensor,
    labels: Tensor,
    weights: Tensor,
    config: PreferenceConfig,
) -> Tensor:
    """KTO: the mean loss of C replies that are good or bad by themselves.

    ``w (1 - sigmoid(y beta (d - z)))`` with ``d = theta - reference`` and ``z`` the divergence of
    the two policies, without gradient (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7 and 8).

    Args:
        mismatch: ``theta - reference`` ``[M]`` of replies to other prompts, whose mean, if it is
            positive, is ``z``.
        labels: ``[C]``, 1 for a good reply and -1 for a bad one.
        weights: ``[C]``.
    """
    z = mismatch.mean().clamp(min=0) if len(mismatch) else torch.zeros_like(theta[:1])
    loss = 1 - torch.sigmoid(labels * config.beta * (theta - reference - z.detach()))
    return (weights * loss).mean()

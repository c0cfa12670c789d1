"""Sample-ratio check: the numbers of agents in the arms must match the split.

If they do not, the arms are not random (a policy drives agents away, or the split is faulty), and
no comparison is valid: Fabijan et al. (2019), "Diagnosing sample ratio mismatch in online
controlled experiments". Each agent's probability is the share at its first call, so the number of
challengers is Poisson-binomial. Its exact distribution is a convolution of one binomial per share.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from babylon.evaluation.experiment.agent_outcomes import Floats
from babylon.evaluation.experiment.review_records import SampleRatio

ALPHA = 0.001


def sample_ratio(shares: Sequence[float], challengers: int) -> SampleRatio:
    """Test the number of challengers. ``shares``: each agent's probability of being one."""
    expected = math.fsum(shares)
    chances = np.ones(1)
    for share, agents in Counter(shares).items():
        chances = np.convolve(chances, _binomial(agents, share))
    observed = chances[challengers]
    p_value = min(float(chances[chances <= observed * (1 + 1e-9)].sum()), 1.0)
    return SampleRatio(
        champion=len(shares) - challengers,
        challenger=challengers,
        expected=expected,
        p_value=p_value,
        broken=p_value < ALPHA,
    )


def _binomial(n: int, p: float) -> Floats:
    """``[n + 1]`` the probability of each count."""
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    ways = log_factorial[n] - log_factorial - log_factorial[::-1]
    chances: Floats = np.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))
    return chances

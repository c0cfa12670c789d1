"""Sample-ratio check: are there as many agents on each side as the split says?

Where there are not, something decides the arm besides chance (agents that a policy drives away,
a faulty split), and no comparison of the arms means anything: Fabijan et al. (2019), "Diagnosing
sample ratio mismatch in online controlled experiments". Each agent has its own probability, the
share at its first call, so the count is Poisson-binomial; its exact distribution is a convolution
of one binomial for each share.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from babylon.evaluation.experiment.agent_outcomes import Floats
from babylon.evaluation.experiment.review_records import SampleRatio

ALPHA = 0.001


def sample_ratio(shares: Sequence[float], challengers: int) -> SampleRatio:
    """``shares``: of each agent, the probability with which it became a challenger."""
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

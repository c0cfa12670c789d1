import math
from random import Random

import pytest

from benchmarks.gateway.latency import queueing_p99_ms


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_the_theory_of_a_queue_is_what_a_simulated_one_does(load: float) -> None:
    random, waited, waits = Random(0), 0.0, list[float]()
    for _ in range(200_000):
        waits.append(waited)
        waited = max(0.0, waited + 1 - random.expovariate(load))
    simulated = sorted(waits)[int(0.99 * len(waits))] + 1
    assert queueing_p99_ms(1000 * load, 1.0) == pytest.approx(simulated, rel=0.05)


def test_a_queue_that_grows_has_no_percentile() -> None:
    assert queueing_p99_ms(1000, 1.0) == math.inf

"""The page of a review."""

from babylon.evaluation.experiment.review_page import _guardrail
from babylon.evaluation.experiment.review_records import Guardrail


def test_an_interval_without_end_fits_its_cell() -> None:
    found = Guardrail(
        name="latency, median",
        state="doubtful",
        bound=1.5,
        champion=114.0,
        challenger=200.0,
        change=1.76,
        low=0.0,
        high=1e304,
    )
    assert "× 1.76 [0.00, 1e+304] | × 1.5 | **doubtful** |" in _guardrail(found)

"""The page of an experiment: what its last look found."""

from typing import Any

import msgspec

from babylon.evaluation.experiment.review_page import WORDS, review_markdown
from babylon.evaluation.experiment.review_records import Review
from babylon.tasks.page import leave_page


async def leave_review(numbers: dict[str, Any]) -> None:
    """Key ``experiment-<salt>``: each look adds a version. ``numbers``: a ``Review``, as JSON."""
    review = msgspec.convert(numbers, Review)
    page = review_markdown(review)
    await leave_page("experiment", review.experiment, page, WORDS[review.decision])

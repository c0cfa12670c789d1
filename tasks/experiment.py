"""The page of an experiment: the result of its last review."""

from collections.abc import Mapping

import msgspec

from babylon.evaluation.experiment.review_page import WORDS, review_markdown
from babylon.evaluation.experiment.review_records import Review
from babylon.tasks.page import leave_page


async def leave_review(numbers: Mapping[str, object]) -> None:
    """Leave the page ``experiment-<salt>``; each review adds a version.

    ``numbers`` is a ``Review`` as JSON.
    """
    review = msgspec.convert(numbers, Review)
    page = review_markdown(review)
    await leave_page("experiment", review.experiment, page, WORDS[review.decision])

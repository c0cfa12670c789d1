"""The page of an experiment: what its last look found."""

from babylon.experiment import Review
from babylon.experiment.report import WORDS, review_markdown
from tasks.page import leave_page


async def leave_review(review: Review) -> None:
    """Key ``experiment-<salt>``: each look adds a version to the experiment's page."""
    await leave_page(
        "experiment", review.experiment, review_markdown(review), WORDS[review.decision]
    )

"""A/B and canary experiments: is the challenger better than the champion on live agents?"""

from babylon.experiment.records import Review
from babylon.experiment.review import review

__all__ = ["Review", "review"]

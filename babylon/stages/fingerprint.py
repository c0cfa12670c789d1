"""A digest of the settings that decide the scores of a window.

A run that was interrupted after scoring is resumed only under the same fingerprint. A setting
counts if another value may change the scored artifact: its rows, its thinning or a score. The
budget of the judge counts, because it decides between the judge, the cheaper one and the heuristic.
An update has a digest of its own (``babylon.training.update_progress``).
"""

import hashlib

import msgspec

from babylon.core.settings import Settings

DECISIVE = ("windows", "quality", "scoring", "judge")  # groups of settings, and the seed
INDIFFERENT = {
    "windows": {"lookback_hours", "frequency", "grace_s", "lease_s"},
    "judge": {"api_key", "concurrency", "timeout_s"},
}
"""Settings of these groups that decide when and how fast a window is scored, not its scores."""


def scoring_fingerprint(settings: Settings) -> str:
    """Return 16 hexadecimal digits that change with the seed and each decisive setting."""
    values = {
        group: getattr(settings, group).model_dump(mode="json", exclude=INDIFFERENT.get(group))
        for group in DECISIVE
    }
    text = msgspec.json.encode({"seed": settings.seed, **values})
    return hashlib.sha256(text).hexdigest()[:16]

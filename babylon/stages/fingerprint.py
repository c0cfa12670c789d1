"""A digest of the settings that decide the scores of a window.

A run that was interrupted after scoring is resumed only under the same fingerprint. A setting
counts if another value may change the scored artifact: its rows, its thinning or a score. The
budget of the judge counts, because it decides between the judge, the cheaper one and the heuristic.
A user's scorer with a context may read any group, so more settings count for it. The rubric's text
and the judges' checkpoints count beside their paths.
An update has a digest of its own (``babylon.training.progress_file``).
"""

import hashlib
from collections.abc import Mapping

import msgspec

from babylon.core.errors import ConfigError
from babylon.core.settings import JudgeSettings, Settings
from babylon.scoring.judge.judgment import checkpoint_digest, load_rubric
from babylon.scoring.judge.panel_members import panel_members
from babylon.scoring.scorer import reads_all_settings

DECISIVE = {"seed", "windows", "quality", "scoring", "judge"}
INDIFFERENT: Mapping[str, bool | set[str]] = {
    "home": True,
    "database": True,
    "windows": {
        "lookback_hours",
        "frequency",
        "grace_s",
        "outcomes_wait_s",
        "freshness_hours",
        "lease_s",
        "retention_days",
    },
    "scoring": {"hold_on_hacking"},
    "judge": {
        "evidence",
        *("api_key", "panel_api_key", "concurrency", "timeout_s", "request_timeout_s", "retries"),
        *("requests_per_minute", "tokens_per_minute"),
    },
    "serving": {"engine_port", "admin_port", "max_concurrency", "max_queue"},
    "tracking": True,
    "prefect": True,
}
"""Settings that decide where, when and how fast a window is scored, never its scores."""


def scoring_fingerprint(settings: Settings) -> str:
    """Return 16 hexadecimal digits that change with each setting that may change a score."""
    read = None if reads_all_settings(settings.scoring.scorer) else DECISIVE
    values = settings.model_dump(mode="json", include=read, exclude=INDIFFERENT)
    values["judge_files"] = _files(settings.judge)
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:16]


def _files(judge: JudgeSettings) -> list[str]:
    """Return digests of the files that the judge's settings name, because a path outlives them."""
    try:
        paths = [one.model_path for one in panel_members(judge)]
        return [load_rubric(judge.rubric).version, *map(checkpoint_digest, filter(None, paths))]
    except (ConfigError, OSError):  # a scorer that needs them names what is missing
        return []

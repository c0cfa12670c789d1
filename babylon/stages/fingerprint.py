"""The settings that decide the scores of a window, as one short digest.

A run that was interrupted after scoring is resumed only under the same fingerprint. A setting
belongs here if another value may change the scored artifact: the rows that are collected and
accepted, the thinning, or a score. Ports, timeouts, concurrency, training, deployment and tracking
do not belong here: an update has its own digest (``babylon.training.update_progress``).
"""

import hashlib

import msgspec

from babylon.core.settings import Settings

DECIDES_SCORES = (
    "seed",
    # rows of the window
    "minutes",
    "recipe",
    "include_late",
    "min_agents",
    "min_actions",
    "reward_threshold",
    # dropout
    "target_trajectories",
    "max_dropout",
    # scores
    "scorer",
    "judge_model",
    "judge_model_path",
    "judge_base_url",
    "judge_temperature",
    "judge_rubric",
    "judge_context_tokens",
    "judge_passes",
    "judge_write_back",
    # the budget decides between the judge, the cheaper judge and the heuristic
    "judge_window_tokens",
    "judge_day_tokens",
    "judge_window_usd",
    "judge_day_usd",
    "judge_prompt_usd",
    "judge_completion_usd",
    "judge_cheaper_model",
    "judge_cheaper_prompt_usd",
    "judge_cheaper_completion_usd",
    "judge_heuristic",
)


def scoring_fingerprint(settings: Settings) -> str:
    """Return the digest of the values of ``DECIDES_SCORES``."""
    values = [getattr(settings, name) for name in DECIDES_SCORES]
    return hashlib.sha256(msgspec.json.encode(values, enc_hook=str)).hexdigest()[:16]

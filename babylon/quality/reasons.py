"""Reasons for rejecting a trajectory. The names are stored, so they must not change."""

from enum import StrEnum


class Reason(StrEnum):
    """Reasons in the order of the checks. The first that applies is reported."""

    OTHER_WINDOW = "other_window"  # started outside the window whose id it carries
    MALFORMED_JSON = "malformed_json"  # not JSON, or not the game's shape
    MISSING_FIELD = "missing_field"  # a required key is absent; the detail is its path
    NON_FINITE_NUMBER = "non_finite_number"  # NaN or infinity, which JavaScript writes as null
    EMPTY_STEPS = "empty_steps"
    STEP_ORDER = "step_order"  # step numbers do not rise
    UNFINISHED_STEP = "unfinished_step"  # an action is still `pending`
    NO_LLM_CALL = "no_llm_call"  # no step has a call of the policy
    NO_RESPONSE = "no_response"  # a reply of the policy is absent or blank
    TOO_FEW_ACTIONS = "too_few_actions"
    BELOW_REWARD_THRESHOLD = "below_reward_threshold"  # only if REWARD_THRESHOLD is set


class RejectedError(Exception):
    """A row that cannot be used. ``check_row`` turns it into a rejection."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

import re

import pytest

from babylon.training.update_health import figure, ruled_out, update_markdown, warnings

SOUND = {
    "training_loss": -0.0123456,
    "calls": 96,
    "iterations": 2,
    "logprob_mismatch": 0.03,
    "staleness_0": 90,
    "ess": 0.3,
    "masked_fraction": 0.2,
    "masked_impossible": 0.0,
    "stopped_early": False,
    "unique_tokens": 1000,
    "lost_tokens": 100,
    "max_tokens": 512,
    "kl_after": 0.06,
    "kl_limit": 0.06,
    "recall": 2.1,
    "recall_best": 2.0,
}


def test_figures_at_their_bounds_are_sound() -> None:
    assert ruled_out(SOUND) is None and list(warnings(SOUND)) == []
    for unmeasured in ({}, {"kl_after": None}):  # by a trainer that measures nothing, and W&B's
        assert ruled_out(unmeasured) is None and list(warnings(unmeasured)) == []


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ({"logprob_mismatch": 0.25}, "logprob mismatch 0.25 nat, allowed is 0.1: .*tokenizer"),
        ({"logprob_mismatch": None}, "logprob mismatch – nat"),
        (
            {"ess": 0.2},
            r"effective sample size 0\.2 of the tokens, needed is 0\.3: .*MAX_STALENESS",
        ),
        ({"ess": None}, "effective sample size –"),
        ({"kl_after": 0.3}, "the update moved the policy by 0.3 nats .* is 0.06: .*LEARNING_RATE"),
        ({"kl_after": None}, "the update moved the policy by – nats"),
        ({"recall": 2.2, "recall_best": 2.0}, "forgotten: .* cost 2.2 nats a token, .*KL_PENALTY"),
        ({"recall": None, "recall_best": 2.0}, "forgotten: .* cost – nats"),
    ],
)
def test_a_refusal_names_the_figure_and_the_remedy(off: dict[str, float | None], said: str) -> None:
    reason = ruled_out(SOUND | off)
    assert reason is not None
    assert re.match(said, reason)
    assert list(warnings(SOUND | off)) == [f"Not to be promoted: {reason}."]


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ({"calls_too_stale": 7}, "7 calls were left out as too stale"),
        ({"calls_without_logprobs": 5}, "5 of 96 calls have no logged logprobs"),
        (
            {"staleness_0": 0},
            "No call was sampled from the parent, so logprob_mismatch was not measured",
        ),
        ({"calls_without_logprobs": 96, "staleness_0": 0}, "96 of 96 calls have no logged"),
        ({"logprob_mismatch": 0.05}, "Logprob mismatch 0.05 nat: the engine answers with other"),
        ({"calls_of_other_weights": 3}, "3 of 90 calls of the parent have logprobs of other"),
        ({"masked_impossible": 0.02}, "2.0% of the tokens are in calls that are impossible"),
        ({"masked_fraction": 0.21}, "21.0% of the tokens were masked"),
        ({"stopped_early": True}, "Stopped early, after iteration 2"),
        ({"iterations_undone": 4}, "Iterations moved the policy too far and were undone 4 times"),
        ({"oom_halvings": 4}, "Memory ran out 4 times: set MAX_TOKENS=512"),
        ({"lost_tokens": 101}, "10% of the forwarded tokens are copies"),
    ],
)
def test_what_deserves_a_look_is_said_and_nothing_else(off: dict[str, float], said: str) -> None:
    (warning,) = warnings(SOUND | off)
    assert warning.startswith(said)


def test_the_advice_on_prompt_order_is_part_of_the_warning() -> None:
    lossy = SOUND | {"lost_tokens": 400, "sharing_advice": "from token 7 a segment differs"}
    (warning,) = warnings(lossy)
    assert warning.endswith("before private text: from token 7 a segment differs.")
    page = update_markdown("w", 8, 5, {"sharing_advice": "a | b"})
    assert "| sharing_advice | a \\| b |" in page


def test_the_page_has_warnings_key_figures_and_everything_else_once() -> None:
    page = update_markdown("2025-11-14T09:00", 8, 5, SOUND | {"ess": 0.2})
    assert page.startswith(
        "# Window 2025-11-14T09:00: policy 5 became 8\n\n- ⚠ Not to be promoted:"
    )
    assert "| training_loss | -0.01235 | mean over train steps |" in page
    assert "| stopped_early | no |" in page
    for name in SOUND:
        assert page.count(f"| {name} |") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (True, "yes"), (12345, "12345"), (0.000123456, "0.0001235"), ("ruler", "ruler")],
)
def test_figures_are_written_for_people(value: object, text: str) -> None:
    assert figure(value) == text

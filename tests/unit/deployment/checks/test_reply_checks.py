"""Each check on numbers that were made for it: it fails for its own fault and for no other."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from babylon.core.probes import ProbeAnswer
from babylon.deployment.checks.check_result import Check, Checked, as_lines
from babylon.deployment.checks.golden_prompts import GoldenPrompt
from babylon.deployment.checks.likelihoods import CheckedReply, Likelihoods
from babylon.deployment.checks.logprob_gap import COARSE, FINE, Tolerance
from babylon.deployment.checks.reply_checks import check_replies

ORDER, HOLD = GoldenPrompt(messages=[], max_tokens=9, form="order"), '{"action":"hold"}'


def _reply(
    text: str = HOLD, *, ended: bool = True, gateway: str = "g", shift: float = 0.0
) -> CheckedReply:
    scores = (-0.5 + shift, -1.5 + shift)
    answer = ProbeAnswer(
        prompt_token_ids=(1,), token_ids=(2, 3), logprobs=scores, text=text, ended=ended
    )
    return CheckedReply(prompt=0, gateway=gateway, answer=answer)


def _likelihoods(count: int = 20) -> Likelihoods:
    """An honest policy: champion and base are a little off, engine and trainer agree."""
    replies = [_reply()] * count
    own = [-0.5 + 1e-7, -1.5] * count
    others = {"champion": [score - 0.01 for score in own], "base": [score + 0.05 for score in own]}
    return Likelihoods(replies=replies, champions=replies, own=own, others=others, absent={})


def _checks(
    given: Likelihoods, golden: Sequence[GoldenPrompt] = (ORDER,), allowed: Tolerance = FINE
) -> dict[str, Check]:
    return {
        check.name: check for check in check_replies(given, golden, allowed=allowed, max_kl=0.5)
    }


def _failures(given: Likelihoods, allowed: Tolerance = FINE) -> dict[str, str]:
    checks = _checks(given, allowed=allowed)
    return {name: check.reason for name, check in checks.items() if not check.passed}


def test_an_honest_policy_passes_every_check() -> None:
    checks = _checks(_likelihoods())
    assert [*checks] == [
        "finite", "served", "agrees", "learned", "kl", "form",
    ]  # fmt: skip
    assert all(check.passed for check in checks.values())


def test_a_logprob_that_is_no_number_ends_the_checks() -> None:
    given = _likelihoods()
    (check,) = _checks(replace(given, own=[float("nan"), *given.own[1:]])).values()
    assert not check.passed
    assert "1 by the policy" in check.reason
    msgspec.json.encode(check.figures)


@pytest.mark.parametrize("other", ["champion", "base"])
def test_an_engine_that_serves_another_policy_is_named(other: str) -> None:
    """One gateway of two: the other one's honest answers do not hide it."""
    given = _likelihoods()
    shift = given.others[other][0] - given.own[0]
    replies = [*given.replies, *[_reply(gateway="wrong", shift=shift)] * 20]
    both = replace(
        given,
        replies=replies,
        own=[*given.own, *given.own],
        others={name: [*scores, *scores] for name, scores in given.others.items()},
    )
    failures = _failures(both)
    assert f"gateway wrong serves the {other} under" in failures["served"]
    assert "gateway wrong" in failures["agrees"]


def test_engine_and_trainer_may_differ_by_the_precision_of_the_engine() -> None:
    given = _likelihoods()
    off = replace(given, replies=[_reply(shift=0.004)] * 20)
    assert "0.004 nats a token" in _failures(off)["agrees"]
    assert _failures(off, COARSE) == {}


def test_the_base_models_own_logprobs_mean_that_nothing_was_learned() -> None:
    given = _likelihoods()
    same = replace(given, others={**given.others, "base": given.own})
    assert "nothing was learned" in _failures(same)["learned"]
    almost = [given.own[0] + 1e-7, *given.own[1:]]
    assert _failures(replace(given, others={**given.others, "base": almost})) == {}


def test_a_policy_far_from_the_champion_is_refused_with_the_number() -> None:
    given = _likelihoods()
    far = replace(given, others={**given.others, "champion": [x - 2 for x in given.own]})
    assert "KL to the champion is 1.14 nats a token, allowed is 0.5" in _failures(far)["kl"]


def test_what_does_not_load_cannot_be_compared_with_and_is_named() -> None:
    given = replace(
        _likelihoods(), others={}, absent=dict.fromkeys(("champion", "base"), "nothing in /gone")
    )
    checks = _checks(given)
    for name in ("kl", "learned"):
        assert checks[name].passed
        assert checks[name].reason == "not measured: nothing in /gone"


@pytest.mark.parametrize("bad", [_reply("hold!"), _reply(HOLD, ended=False), _reply('{"a":1}')])
def test_malformed_and_endless_replies_are_refused_beyond_bad_luck(bad: CheckedReply) -> None:
    given = _likelihoods()
    unlucky = replace(given, replies=[*given.replies[:15], *[bad] * 5])
    assert _failures(unlucky) == {}
    refused = _failures(replace(given, replies=[*given.replies[:13], *[bad] * 7]))
    assert "7 of 20 replies are malformed, of the champion's 0 of 20" in refused["form"]
    careless = replace(given, replies=[bad] * 20, champions=[bad] * 20)
    assert _failures(careless) == {}


def test_malformed_replies_at_a_hundred_gateways_are_refused() -> None:
    given = _likelihoods(800)  # eight prompts, each asked at every gateway
    refused = _failures(replace(given, replies=[_reply("hold!")] * 800))
    assert "at most once in 1,000,000,000,000 times" in refused["form"]


def test_replies_without_a_form_are_not_judged_by_it() -> None:
    free = GoldenPrompt(messages=[], max_tokens=9, form=None)
    checks = _checks(replace(_likelihoods(), replies=[_reply("")] * 20), [free])
    assert checks["form"].passed
    assert "not measured" in checks["form"].reason


def test_the_reason_is_the_first_failure_and_the_record_is_json() -> None:
    checks = (
        Check.of("digest", None, "as it was"),
        Check.of("kl", "too far: train less", kl=float("inf")),
        Check.of("form", "malformed"),
    )
    checked = Checked(policy_version=2, champion_version=1, gateways=("g",), checks=checks)
    assert not checked.passed
    assert checked.reason == "kl: too far: train less"
    stored = msgspec.json.decode(msgspec.json.encode(checked.as_json()))
    assert stored["passed"] is False
    assert stored["checks"]["kl"]["figures"] == {"kl": None}
    assert as_lines(stored) == {
        "digest": "as it was", "kl": "FAILED: too far: train less", "form": "FAILED: malformed",
    }  # fmt: skip

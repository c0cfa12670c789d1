"""Failpoints themselves: silent when unset, and a typing error is an error."""

import pytest

from babylon.core import failpoints
from babylon.core.errors import ConfigError
from babylon.core.failpoints import FailpointError, failpoint, parse


def test_a_list_of_failpoints_with_visits_and_actions_is_read() -> None:
    assert parse("policy.before,artifact.written@3,verdict.before=raise,state.after@2=stop") == {
        ("policy.before", 1): "kill",
        ("artifact.written", 3): "kill",
        ("verdict.before", 1): "raise",
        ("state.after", 2): "stop",
    }
    assert parse("") == {}


@pytest.mark.parametrize(
    "text", ["policy.befor", "policy.before=die", "policy.before@", "policy.before@two", "@2"]
)
def test_an_unknown_failpoint_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"BABYLON_FAILPOINT='.+': a failpoint is NAME"):
        parse(text)


def test_only_the_named_visit_of_the_named_place_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", lambda: parse("claim.after@2=raise"))
    monkeypatch.setattr(failpoints, "_reached", failpoints.Counter())
    failpoint("claim.after")
    failpoint("claim.before")
    with pytest.raises(FailpointError, match="failpoint claim"):
        failpoint("claim.after")
    failpoint("claim.after")

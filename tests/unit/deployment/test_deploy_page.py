"""The page of a window's deploy stage."""

import pytest

from babylon.core.types import Change, Claim, Deployed, Verdict
from babylon.deployment.deploy_page import deployed_markdown

CLAIM = Claim(window_id="2025-11-14T09:00", epoch=1, owner="w")
REJECTED = Verdict(claim=CLAIM, policy_version=3, route_version=7, promote=False, reason="a loss")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), "Route 7 is in force."),  # by gateways that nobody asked
        ((Change(route_version=7, policy_version=1),), "in force, served by no gateway."),
        (
            (Change(route_version=7, policy_version=1, acknowledged_by=("g1", "g2")),),
            "Route 7 is in force, served by g1, g2.",
        ),
    ],
)
def test_a_page_says_who_serves_a_route_if_that_is_known(
    changes: tuple[Change, ...], told: str
) -> None:
    """A rejected policy is deployed nowhere, and the gateways serve another one."""
    deployed = Deployed(
        claim=CLAIM,
        policy_version=1,
        deployed=False,
        route_version=7,
        reason="a loss",
        changes=changes,
    )
    assert told in deployed_markdown(deployed, REJECTED)

"""Experiments: how one begins, changes and ends, by hand and by the windows that are trained."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from babylon.core.errors import ConfigError, ExperimentError, SupersededError
from babylon.core.settings import ExperimentSettings, Settings, WindowSettings
from babylon.core.types import CANARY, Claim
from babylon.deployment import decide_experiment
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.decide_experiment import end_without_window
from babylon.deployment.experiments import Experiment, run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.evaluation.experiment.review import review
from babylon.evaluation.experiment.review_records import Decision, Guardrail, Review, SampleRatio
from babylon.stages.deploy import deploy_checkpoint
from babylon.store import Store
from babylon.store.routes import current_route, list_routes
from tests.deployments import announced, serving, three_policies, verdict

BY_HAND = ChangeRequest(author="operator", reason="by hand")


@pytest.fixture
async def claim(store: Store) -> Claim:
    return await three_policies(store)


pytestmark = pytest.mark.usefixtures("claim")


async def begin(store: Store, settings: Settings, mode: Experiment = "ab") -> None:
    """Policy 1 becomes the challenger of policy 0."""
    await run_experiment(store, checks_under(settings), mode, 1, None, BY_HAND)


async def test_an_experiment_keeps_its_salt_while_its_share_changes(
    store: Store, settings: Settings
) -> None:
    made = [await run_experiment(store, checks_under(settings), "canary", 1, None, BY_HAND)]
    for share in (0.25, 0.1):
        made.append(
            await run_experiment(store, checks_under(settings), "canary", None, share, BY_HAND)
        )
    assert [(one.challenger_version, one.share) for one in made] == [(1, 0.05), (1, 0.25), (1, 0.1)]
    assert len({one.salt for one in made}) == 1
    await roll_back(store, BY_HAND)
    again = await run_experiment(store, checks_under(settings), "canary", 1, 0.5, BY_HAND)
    assert again.salt not in (None, made[0].salt)
    assert await serving(store) == 0


async def test_a_challenger_may_be_policy_0(store: Store, settings: Settings) -> None:
    await replace_champion(store, checks_under(settings), 1, BY_HAND)
    await run_experiment(store, checks_under(settings), "ab", 0, 0.5, BY_HAND)
    made = await run_experiment(store, checks_under(settings), "ab", 0, 0.6, BY_HAND)
    assert (made.policy_version, made.challenger_version, made.share) == (1, 0, 0.6)


@pytest.mark.parametrize(
    ("mode", "version", "share", "message"),
    [
        ("ab", 2, 0.5, "ab of policy 1 against policy 0 runs: end it first, by `babylon deploy"),
        ("canary", 1, 0.5, "ab of policy 1 against policy 0 runs"),
        ("ab", None, None, "ab of policy 1 runs at 50%: give its new share"),
    ],
)
async def test_only_the_share_of_a_running_experiment_changes(
    store: Store,
    settings: Settings,
    mode: Experiment,
    version: int | None,
    share: float | None,
    message: str,
) -> None:
    await begin(store, settings)
    with pytest.raises(ExperimentError, match=message):
        await run_experiment(store, checks_under(settings), mode, version, share, BY_HAND)
    assert len(await list_routes(store)) == 2


@pytest.mark.parametrize("asked", [(1, None), (1, 0.3), (None, 0.3)])
async def test_an_experiment_that_is_so_already_is_only_waited_for(
    store: Store, settings: Settings, asked: tuple[int | None, float | None]
) -> None:
    made = await run_experiment(store, checks_under(settings), "ab", 1, 0.3, BY_HAND)
    async with announced(store):
        again = await run_experiment(store, checks_under(settings), "ab", *asked, BY_HAND)
    assert again.acknowledged_by == ("g1",)
    assert (again.salt, again.share, again.route_version) == (made.salt, 0.3, 2)


@pytest.mark.parametrize(
    ("version", "message"), [(0, "policy 0 is the champion"), (None, "no canary runs: name")]
)
async def test_an_experiment_needs_a_challenger(
    store: Store, settings: Settings, version: int | None, message: str
) -> None:
    with pytest.raises(ExperimentError, match=message):
        await run_experiment(store, checks_under(settings), "canary", version, None, BY_HAND)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 5.0, float("nan")])
async def test_a_share_is_between_0_and_1(store: Store, settings: Settings, share: float) -> None:
    with pytest.raises(ConfigError, match="give a fraction of the agents between 0 and 1"):
        await run_experiment(store, checks_under(settings), "ab", 1, share, BY_HAND)


async def test_only_the_challenger_may_replace_and_end_it(store: Store, settings: Settings) -> None:
    await begin(store, settings)
    for version in (0, 2):
        with pytest.raises(ExperimentError, match=r"rollback` ends that, or .*deploy replace 1"):
            await replace_champion(store, checks_under(settings), version, BY_HAND)
    won = await replace_champion(store, checks_under(settings), 1, BY_HAND)
    assert (won.policy_version, won.challenger_version, won.mode) == (1, None, "replace")
    assert (await roll_back(store, BY_HAND)).policy_version == 0


@pytest.mark.parametrize(("strategy", "share"), [("ab", "50%"), ("canary", "5%")])
async def test_a_checkpoint_that_passed_becomes_a_challenger_where_that_is_the_strategy(
    store: Store, settings: Settings, claim: Claim, strategy: str, share: str
) -> None:
    settings = settings.replace(deployment={"strategy": strategy})
    deployed = await deploy_checkpoint(store, settings, verdict(claim))
    assert (deployed.deployed, deployed.arm, deployed.policy_version) == (True, "challenger", 2)
    assert deployed.reason == f"challenger at {share}: test"
    assert await serving(store) == 0
    again = await deploy_checkpoint(store, settings, verdict(claim))  # after a crash
    assert again == replace(deployed, changes=())
    assert len(await list_routes(store)) == 2


async def test_experiments_block_deployment(store: Store, settings: Settings, claim: Claim) -> None:
    await begin(store, settings)
    with pytest.raises(SupersededError, match="policy 1 is compared with policy 0 on 50% of the"):
        await deploy_checkpoint(store, settings, verdict(claim))
    kept = await deploy_checkpoint(store, settings, verdict(claim, promote=False))
    assert (kept.deployed, kept.arm, kept.policy_version, kept.route_version) == (False, None, 0, 2)
    assert kept.review is not None and kept.review["decision"] == "insufficient"


Deciding = Callable[..., None]


@pytest.fixture
def deciding(monkeypatch: pytest.MonkeyPatch) -> Deciding:
    """Have the analysis come to a decision, and to other things, whatever there is to look at."""

    def decide(decision: Decision, **figures: Any) -> None:
        async def decided(
            store: Store, windows: WindowSettings, rules: ExperimentSettings
        ) -> Review:
            found = await review(store, windows, rules)
            assert found is not None
            return replace(found, decision=decision, reason="by the numbers", **figures)

        monkeypatch.setattr(decide_experiment, "review", decided)

    return decide


async def test_a_challenger_that_won_is_put_in_force_and_voids_other_verdicts(
    store: Store, settings: Settings, claim: Claim, deciding: Deciding
) -> None:
    await begin(store, settings)
    deciding("promote")
    with pytest.raises(SupersededError, match="started from policy 0, and policy 1 leads now"):
        await deploy_checkpoint(store, settings, verdict(claim))
    route = await current_route(store)
    assert (route.policy_version, route.split) == (1, None)
    assert (route.author, route.reason) == ("worker", "ab: by the numbers")


@pytest.mark.parametrize("decision", ["rollback", "keep"])
async def test_an_experiment_that_the_champion_survives_lets_the_next_checkpoint_out(
    store: Store, settings: Settings, claim: Claim, deciding: Deciding, decision: Decision
) -> None:
    await begin(store, settings)
    deciding(decision)
    deployed = await deploy_checkpoint(store, settings, verdict(claim))
    assert (deployed.deployed, deployed.policy_version) == (True, 2)
    assert [change.policy_version for change in deployed.changes] == [0, 2]


async def test_an_experiment_is_decided_even_when_the_window_has_nothing_to_deploy(
    store: Store, settings: Settings, claim: Claim, deciding: Deciding
) -> None:
    await begin(store, settings)
    deciding("promote")
    kept = await deploy_checkpoint(store, settings, verdict(claim, promote=False))
    assert (kept.deployed, kept.reason, kept.policy_version) == (False, "test", 1)


async def test_a_canary_takes_one_step_for_each_window_that_ended_after_the_last(
    store: Store, settings: Settings, claim: Claim, deciding: Deciding
) -> None:
    deciding("insufficient")
    settings = settings.replace(deployment={"strategy": "canary"})
    await begin(store, settings, "canary")
    later, earlier = "2025-11-14T10:30", "2025-11-14T11:00"  # the claim's window ends at 11:00

    async def after_a_window(began: str) -> float | None:
        await store.pool.execute(f"UPDATE babylon.routes SET created_at = '{began} UTC'")
        await deploy_checkpoint(store, settings, verdict(claim, promote=False))
        return (await current_route(store)).share

    assert await after_a_window(earlier) == 0.05
    assert [await after_a_window(later) for _ in range(4)] == [0.25, 0.5, 0.5, 0.5]
    assert len({route.salt for route in await list_routes(store) if route.salt}) == 1


RATIO = SampleRatio(champion=10, challenger=0, expected=5.0, p_value=1e-4, broken=True)
DOUBTFUL = Guardrail(name="failed actions", state="doubtful", bound=0.05)


@pytest.mark.parametrize(
    "figures", [{"agents": RATIO}, {"measured_agents": RATIO}, {"guardrails": (DOUBTFUL,)}]
)
async def test_a_canary_of_which_the_analysis_warns_takes_no_step(
    store: Store, settings: Settings, claim: Claim, deciding: Deciding, figures: dict[str, Any]
) -> None:
    settings = settings.replace(deployment={"strategy": "canary"})
    await begin(store, settings, "canary")
    await store.pool.execute("UPDATE babylon.routes SET created_at = '2025-11-14'")
    for warning, share in ((figures, 0.05), ({}, 0.25)):
        deciding("insufficient", **warning)
        await deploy_checkpoint(store, settings, verdict(claim, promote=False))
        assert (await current_route(store)).share == share


@pytest.mark.parametrize(
    ("decision", "ends"),
    [("rollback", True), ("keep", True), ("promote", False), ("insufficient", False)],
)
async def test_without_a_window_an_experiment_can_only_end(
    store: Store, settings: Settings, deciding: Deciding, decision: Decision, ends: bool
) -> None:
    assert await end_without_window(store, settings.windows, settings.experiment) is None
    await begin(store, settings, "canary")
    deciding(decision)
    decided = await end_without_window(store, settings.windows, settings.experiment)
    assert decided is not None and decided.review.decision == decision
    route = await current_route(store)
    assert (route.policy_version, route.split is None) == (0, ends)
    if ends:
        assert (route.author, route.reason) == ("experiment review", "canary: by the numbers")


async def test_a_canary_begun_by_hand_is_ramped_by_hand(
    store: Store, settings: Settings, claim: Claim, deciding: Deciding
) -> None:
    deciding("insufficient")
    await begin(store, settings, "canary")
    await store.pool.execute("UPDATE babylon.routes SET created_at = '2025-11-14'")
    await deploy_checkpoint(store, settings, verdict(claim, promote=False))
    assert (await current_route(store)).share == 0.05


async def test_a_canary_of_the_gate_is_ramped_whatever_the_strategy(
    store: Store, settings: Settings, claim: Claim, deciding: Deciding
) -> None:
    deciding("insufficient")
    await begin(store, settings, "canary")
    await store.pool.execute("UPDATE babylon.routes SET created_at = '2025-11-14'")
    told = asdict(replace(verdict(claim), evidence=CANARY))
    await store.pool.execute(
        "UPDATE babylon.policies SET verdict = $1 WHERE policy_version = 1", told
    )
    await deploy_checkpoint(store, settings, verdict(claim, promote=False))
    assert (await current_route(store)).share == 0.25

"""The champion changes under load: two gateways, streaming clients, not one bad answer.

``SWAPS`` is how many changes are made; ``make faults`` makes a thousand, and 244 with the official
SDKs (``SDK_SWAPS``).
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from babylon.core.settings import Settings
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.routes import current_route
from tests.faults.sdk_clients import KINDS, check_sdk_recorded, save_sdk_policies, sdk_clients
from tests.faults.streams import (
    check_recorded,
    clients,
    more,
    replicas,
    save_policies,
    with_policies,
)
from tests.ports import free_port

ALL = os.environ.get("FAULTS") == "all"
SWAPS = int(os.environ.get("SWAPS", "1000" if ALL else "12"))
SDK_SWAPS = int(os.environ.get("SDK_SWAPS", "244" if ALL else "5"))
POLICIES = 6
CLIENTS = 24 if ALL else 16  # each SDK's way to ask, on both gateways
SWAP = ChangeRequest(author="test", reason="swap", force=True)
BACK = ChangeRequest(author="test", reason="back")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_policies(tmp_path_factory.mktemp("speaking"), POLICIES)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace(serving={"engine_port": free_port()})


@pytest.mark.parametrize("change", ["replace", "rollback"])
async def test_no_answer_is_lost_mixed_or_attributed_to_another_policy_in_a_thousand_changes(
    change: str, settings: Settings, store: Store, checkpoints: list[Path]
) -> None:
    await with_policies(store, checkpoints)
    changes = {"replace": replaces, "rollback": rollbacks}[change]
    async with (
        replicas(settings, count=2) as serving,
        clients(settings, serving.urls, CLIENTS) as seen,
    ):
        await more(seen, CLIENTS)
        await changes(store, settings)
        await more(seen, CLIENTS)
    await wait_until_recorded(store)

    assert not seen.errors and not seen.refusals
    await check_recorded(store, seen.answers)
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.calls") == len(seen.answers)
    assert (await current_route(store)).route_version > SWAPS
    served = Counter(answer.version for answer in seen.answers)
    assert len(served) == (POLICIES if change == "replace" else 2), served


async def test_no_answer_of_an_sdk_is_lost_mixed_or_attributed_to_another_policy(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    """Chat, Responses and Messages, with tools, streamed and whole: three clients of each."""
    checkpoints = save_sdk_policies(tmp_path, POLICIES)
    await with_policies(store, checkpoints)
    async with (
        replicas(settings, count=2) as serving,
        sdk_clients(settings, serving.urls, CLIENTS) as seen,
    ):
        await more(seen, CLIENTS)
        await replaces(store, settings, SDK_SWAPS)
        await more(seen, CLIENTS)
    await wait_until_recorded(store)

    assert not seen.errors, seen.errors[0]
    largest = await check_sdk_recorded(store, seen.answers, checkpoints)
    assert largest < 1e-4
    assert (await current_route(store)).route_version > SDK_SWAPS
    assert len({answer.version for answer in seen.answers}) == POLICIES
    kinds = Counter(answer.kind for answer in seen.answers)
    assert len(kinds) == 2 * len(KINDS)
    assert any(answer.calls for answer in seen.answers)
    print(f"{SDK_SWAPS} swaps, {len(seen.answers)} answers, logprobs within {largest:.1e}: {kinds}")


async def replaces(store: Store, settings: Settings, swaps: int = SWAPS) -> None:
    """To each policy in turn: every one has to be loaded, since only the one before stays warm."""
    for number in range(swaps):
        version = (number + 1) % POLICIES
        await replace_champion(store, checks_under(settings), version, SWAP)


async def rollbacks(store: Store, settings: Settings) -> None:
    """There, and back again to what is still warm."""
    for _ in range(SWAPS // 2):
        await replace_champion(store, checks_under(settings), 1, SWAP)
        await roll_back(store, BACK)
    assert (await current_route(store)).policy_version == 0

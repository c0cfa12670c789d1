"""One window of play that came over HTTP only raises the reward on tasks that it does not hold.

The tiny policy chooses whether to call, not whom to ask about, so unseen tickers are other prompts
and no harder.
"""

import math
import os
from collections.abc import Sequence
from statistics import fmean, variance

import pytest

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.stages.collect import collect_window
from babylon.stages.dropout import thin_window
from babylon.stages.score import score_window
from babylon.stages.train import train_window
from babylon.stages.validate import validate_window
from babylon.store import Store
from babylon.store.late import store_collected
from babylon.store.windows import claim_window
from examples.tool_task import TICKERS, play_tasks
from tests.calling_policy import save_calling_policy
from tests.integration.test_play import LAST_HOUR
from tests.integration.test_serving import register, running_stack, until_healthy

pytestmark = pytest.mark.skipif(
    "LEARNING" not in os.environ, reason="a minute of play: run it with `make learning`"
)
UNSEEN = [f"T{number}" for number in range(10)]


def learning(settings: Settings) -> Settings:
    """Settings by which one window of the tiny policy's play is learned from its rewards."""
    return settings.replace(
        quality={"min_actions": 1},
        scoring={"scorer": "feedback"},
        training={
            **{"tuning": "full", "learning_rate": 3e-3, "iterations": 4, "warmup_steps": 0},
        },
    )


async def trained_on_last_hour(store: Store, settings: Settings, played: int) -> int:
    """Train on the trajectories of the last hour, all of them; return the policy's version."""
    claim = await claim_window(store, LAST_HOUR, owner="test", lease_s=600)
    collected = await collect_window(store, settings.home, claim, LAST_HOUR)
    rows = await store.game.fetch(
        'SELECT "trajectoryId" FROM trajectories WHERE "windowId" = $1', LAST_HOUR.id
    )
    await store_collected(store, claim, [row[0] for row in rows])
    validated = await validate_window(store, settings, collected)
    scored = await score_window(store, settings, thin_window(settings, validated))
    assert len(rows) == scored.eligible == played
    return (await train_window(store, settings, scored)).policy_version


def assert_higher(after: Sequence[float], before: Sequence[float]) -> None:
    """The mean has risen: the 95 % interval of the difference is above zero."""
    difference = fmean(after) - fmean(before)
    error = math.sqrt(variance(after) / len(after) + variance(before) / len(before))
    print(
        f"reward {fmean(before):.2f} → {fmean(after):.2f}, +{difference:.2f} ± {1.96 * error:.2f}"
    )
    assert difference > 1.96 * error


async def test_a_window_of_http_play_raises_the_reward_on_unseen_tasks(
    store: Store, settings: Settings
) -> None:
    settings = learning(settings)
    await register(store, [save_calling_policy(settings.home.root / "policy")])
    key = str(local_key(settings.home.root))
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        before = await play_tasks(stack.url, key, UNSEEN, 80)
        await play_tasks(stack.url, key, TICKERS, 32, at=LAST_HOUR.start.isoformat())
        await stack.route_to(await trained_on_last_hour(store, settings, len(TICKERS) * 32))
        after = await play_tasks(stack.url, key, UNSEEN, 80)
    assert_higher(after, before)

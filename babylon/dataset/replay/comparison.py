"""``babylon dataset replay``: the recorded and replayed P&L of an agent's windows."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from babylon.core.errors import ReplayError
from babylon.dataset.replay.counterfactual import Replayed, replay
from babylon.dataset.replay.dataset_reader import read_dataset
from babylon.evaluation.arena.play import Decide
from babylon.evaluation.arena.players import find_player, is_version, unregistered_player
from babylon.evaluation.rebuild.recorded import Rebuilt, Skipped
from babylon.evaluation.rebuild.recorded_windows import rebuild_windows, recorded_windows
from babylon.store import Store

RECORDED = "recorded"
OpenStore = Callable[[], AbstractAsyncContextManager[Store]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Results of ``policy`` in the place of ``agent``; P&L in USD, means over the scenarios."""

    policy: str
    agent: str
    results: tuple[Replayed, ...]
    skipped: tuple[Skipped, ...]
    missing: tuple[str, ...]

    @property
    def mean_recorded(self) -> float:
        return fmean(one.recorded_pnl for one in self.results)

    @property
    def mean_replayed(self) -> float:
        return fmean(one.replayed_pnl for one in self.results)

    def summary(self) -> dict[str, object]:
        """Return the report for ``--json``."""
        return {
            "policy": self.policy,
            "agent": self.agent,
            "scenarios": [{**asdict(one), "difference": one.difference} for one in self.results],
            "mean_recorded_pnl": self.mean_recorded,
            "mean_replayed_pnl": self.mean_replayed,
            "skipped": [asdict(one) for one in self.skipped],
            "missing": list(self.missing),
        }


async def replay_report(
    opened: OpenStore,
    seed: int,
    prefix: str,
    agent: str,
    policy: str,
    *,
    source: Path | None = None,
    interpolate: bool = False,
) -> ReplayReport:
    """Replay every scenario of the windows whose id begins with ``prefix``.

    The rows come from the dataset at ``source``, or from the database. ``opened`` is called only
    if the database is needed.

    Raises:
        ReplayError: No scenario can be replayed, or the agent was not recorded.
        ArenaError: ``policy`` is not a player, or its checkpoint was removed.
        ModelError: ``policy`` does not exist or does not load.
    """
    # A dataset must be replayable on a machine without its database.
    if source is not None:
        rebuilt = await asyncio.to_thread(read_dataset, source, prefix)
    else:
        async with opened() as store:
            windows = await recorded_windows(store, prefix)
            rebuilt = await rebuild_windows(store, windows, interpolate=interpolate)
    if not rebuilt.scenarios:
        raise ReplayError(_none(prefix, rebuilt))
    decide = await _decide(opened, seed, policy)
    results = await asyncio.to_thread(replay, rebuilt.scenarios, agent, decide)
    played = {one.scenario_id for one in results}
    return ReplayReport(
        policy=policy,
        agent=agent,
        results=tuple(results),
        skipped=rebuilt.skipped,
        missing=tuple(
            f"{one.scenario.scenario_id}: {line}"
            for one in rebuilt.scenarios
            if one.scenario.scenario_id in played
            for line in one.missing
        ),
    )


async def _decide(opened: OpenStore, seed: int, policy: str) -> Decide | None:
    """Load the policy; None stands for the recorded agent itself."""
    if policy == RECORDED:
        return None
    if is_version(policy):
        async with opened() as store:
            player = await find_player(store, policy, seed)
    else:
        player = unregistered_player(policy, seed)
    return await asyncio.to_thread(player.enter)


def _none(prefix: str, rebuilt: Rebuilt) -> str:
    reasons = list(dict.fromkeys(one.reason for one in rebuilt.skipped))
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    return f"nothing of {prefix or 'any window'} can be replayed: {'; '.join(reasons[:3])}{more}"

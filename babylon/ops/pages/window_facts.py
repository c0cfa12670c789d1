"""The facts about one window, read from Postgres and from its scored artifact."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import fmean

from babylon.core.artifacts import read_artifact
from babylon.core.errors import ArtifactError
from babylon.core.home import Home
from babylon.core.objects import fetch
from babylon.core.windows import FINISHED
from babylon.store import Store
from babylon.store.attempts import Attempt, list_attempts
from babylon.store.judgments import DaySpent, spent_by_day, usd_of_days
from babylon.store.policies import Policy, policy_of_batch
from babylon.store.rejections import RejectedFor, window_rejections
from babylon.store.scores import StoredScore, window_scores
from babylon.store.window_health import WindowHealth, get_health
from babylon.store.windows import WindowRow, get_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A scored trajectory: who played it, its P&L in USD, and its score."""

    trajectory_id: str
    agent_id: str
    scenario_id: str
    pnl_usd: float
    score: StoredScore


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSum:
    """An agent's trajectories in the window: their number, mean P&L in USD, and mean score."""

    agent_id: str
    trajectories: int
    pnl_usd: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """One window. ``played`` is best first, and empty once retention removed the artifact.

    ``judging`` is the judge's cost by day, and ``days_usd`` that of all windows on these days.
    ``policy`` is the one that the window trained; ``report`` the directory of its gate.
    """

    row: WindowRow
    judging: Sequence[DaySpent] = ()
    days_usd: Mapping[date, float] = field(default_factory=dict)
    played: Sequence[Played] = ()
    rejections: Sequence[RejectedFor] = ()
    attempts: Sequence[Attempt] = field(default_factory=list)
    health: WindowHealth | None = None
    policy: Policy | None = None
    report: Path | None = None

    @property
    def agents(self) -> list[AgentSum]:
        """The agents, the one with the highest mean P&L first."""
        own: dict[str, list[Played]] = {}
        for one in self.played:
            own.setdefault(one.agent_id, []).append(one)
        sums = [
            AgentSum(
                agent_id=agent,
                trajectories=len(plays),
                pnl_usd=fmean(play.pnl_usd for play in plays),
                score=fmean(play.score.score for play in plays),
            )
            for agent, plays in own.items()
        ]
        return sorted(sums, key=lambda agent: -agent.pnl_usd)


def gate_measure(verdict: Mapping[str, object]) -> str:
    """Return what a stored verdict compares: P&L, or the score of a task, which has no drawdown."""
    task = verdict.get("pnl_after") is not None and verdict.get("drawdown_after") is None
    return "mean score" if task else "mean P&L, $"


async def read_window_facts(store: Store, window_id: str) -> WindowFacts | None:
    """Return what is known of a window; ``None`` if nobody ever claimed it."""
    row = await get_window(store, window_id)
    if row is None:
        return None
    # An earlier attempt may have left a batch; its policy is this window's once it is trained.
    trained = row.batch_id if row.state in FINISHED else None
    policy = await policy_of_batch(store, trained) if trained else None
    report = (policy.verdict or {}).get("report") if policy else None
    judging = await spent_by_day(store, window_id=window_id)
    return WindowFacts(
        row=row,
        judging=judging,
        days_usd=await usd_of_days(store, {one.day for one in judging}),
        played=await _played(store, row),
        rejections=await window_rejections(store, window_id),
        attempts=await list_attempts(store, [window_id]),
        health=await get_health(store, window_id),
        policy=policy,
        report=await asyncio.to_thread(_report, store.home, report) if report else None,
    )


def _report(home: Home, reference: str) -> Path:
    path = Path(home.resolve(reference))
    with suppress(ArtifactError):  # retention removed it
        fetch(home, path)
    return path


async def _played(store: Store, row: WindowRow) -> list[Played]:
    if row.scored is None:
        return []
    columns = ["trajectory_id", "agent_id", "scenario_id", "pnl_usd"]
    try:
        frame = await asyncio.to_thread(read_artifact, store.home, row.scored.artifact, columns)
    except ArtifactError:  # retention removed it
        return []
    scores = {one.trajectory_id: one for one in await window_scores(store, row.window_id)}
    plays = [
        Played(**play, score=scores[play["trajectory_id"]])
        for play in frame.iter_rows(named=True)
        if play["trajectory_id"] in scores
    ]
    return sorted(plays, key=lambda play: (-play.score.score, play.trajectory_id))

"""One look at an experiment: read, compare, decide, and keep what was seen.

Agents of one market move the prices of one another, so an agent's result depends a little on the
arms of others (interference). Dealing agents, not markets, cannot remove that; the report says so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np

from babylon.core.settings import Settings
from babylon.core.windows import last_complete_window
from babylon.evaluation.experiment.cells import Exposure, cells_of, make_cells
from babylon.evaluation.experiment.decision import Evidence, decide
from babylon.evaluation.experiment.difference import difference
from babylon.evaluation.experiment.guardrails import (
    BROKEN_OFF,
    CUT,
    FAILED,
    LOSSES,
    MEDIAN,
    P95,
    Measure,
    guard,
)
from babylon.evaluation.experiment.plays import Result, finished, means, results
from babylon.evaluation.experiment.review_records import Guardrail, Review, SampleRatio
from babylon.evaluation.experiment.sample_ratio import sample_ratio
from babylon.store.connection import Store, require_game_tables
from babylon.store.database_clock import clock_of
from babylon.store.experiments import (
    AgentCalls,
    Experiment,
    agent_calls,
    find_experiment,
    keep_review,
    pinned_calls,
    plays,
    plays_before,
    scores_of,
)

if TYPE_CHECKING:
    from babylon.store.connection import Connection

__all__ = ["Review", "review"]


async def review(store: Store, settings: Settings, experiment: str | None = None) -> Review | None:
    """Look at an experiment, by the salt of its routes, or at the one that runs now.

    Returns:
        ``None`` when no experiment runs, or none has that salt.

    Raises:
        DatabaseError: the database has no game tables, so there is no play.
    """
    require_game_tables(store)
    found = await find_experiment(store, experiment)
    if found is None:
        return None
    async with (
        store.pool.acquire() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        look = await _look(connection, settings, found)
    await keep_review(store, look.experiment, look.reviewed_at, look.decision, asdict(look))
    return look


async def _look(connection: "Connection", settings: Settings, found: Experiment) -> Review:
    now = (await clock_of(connection)).now
    agents = await agent_calls(connection, found)
    exposures = [
        Exposure(unit=one.unit, stage=one.stage, challenger=one.challenger) for one in agents
    ]
    played, excluded = await _played(connection, settings, found, now)
    before = await _before(connection, settings, found, played)
    pnl = [(play.unit, play.stage, play.pnl_usd) for play in played]
    cells = cells_of(exposures, pnl, before)
    scores = await scores_of(connection, [play.trajectory_id for play in played])
    judged = [
        (play.unit, play.stage, scores[play.trajectory_id])
        for play in played
        if play.trajectory_id in scores
    ]
    everybody = _ratio(exposures, found)
    measured = {play.unit for play in played}
    with_play = _ratio([one for one in exposures if one.unit in measured], found)
    compared = difference(cells)
    guardrails = _guardrails(agents, exposures, played)
    hours = ((found.ended_at or now) - found.began_at) / timedelta(hours=1)
    evidence = Evidence(
        pnl=compared, ratios=(everybody, with_play), guardrails=guardrails, hours=hours
    )
    decision, reason = decide(evidence, settings)
    return Review(
        experiment=found.salt,
        mode=found.mode,
        champion_version=found.champion_version,
        challenger_version=found.challenger_version,
        shares=found.shares,
        began_at=found.began_at,
        ended_at=found.ended_at,
        reviewed_at=now,
        hours=hours,
        decision=decision,
        reason=reason,
        agents=everybody,
        measured_agents=with_play,
        plays=len(played),
        calls=sum(one.calls for one in agents),
        crossed=_crossed(agents),
        pnl=compared,
        raw_pnl=difference(replace(cells, before=np.full(len(cells.before), np.nan))),
        score=difference(cells_of(exposures, judged, {})),
        guardrails=guardrails,
        excluded=dict(excluded),
    )


async def _played(
    connection: "Connection", settings: Settings, found: Experiment, now: datetime
) -> tuple[list[Result], Counter[str]]:
    """Play that counts; of a window that is not over, one arm's could be done sooner."""
    settled = now - timedelta(seconds=settings.windows.grace_s)
    over = last_complete_window(settled, settings.windows.minutes).end
    counting, excluded = finished(await plays(connection, found), over)
    played, without = await results(connection, counting)
    excluded += without
    if pinned := await pinned_calls(connection, found):
        excluded["calls for a pinned version"] = pinned
    return played, excluded


async def _before(
    connection: "Connection", settings: Settings, found: Experiment, played: Sequence[Result]
) -> dict[str, float]:
    units = sorted({play.unit for play in played})
    since = found.began_at - timedelta(hours=settings.windows.lookback_hours)
    history, _ = await results(connection, await plays_before(connection, found, units, since))
    return means(history)


def _ratio(exposures: Sequence[Exposure], found: Experiment) -> SampleRatio:
    """By the first stage that each agent was in; exposures are ordered by stage."""
    first: dict[str, Exposure] = {}
    for one in exposures:
        first.setdefault(one.unit, one)
    shares = [found.shares[one.stage] for one in first.values()]
    return sample_ratio(shares, sum(one.challenger for one in first.values()))


def _crossed(agents: Sequence[AgentCalls]) -> int:
    """Agents that met both arms."""
    arms: dict[str, set[bool]] = {}
    for one in agents:
        arms.setdefault(one.unit, set()).update({one.challenger, one.challenger ^ one.both})
    return sum(len(met) > 1 for met in arms.values())


def _guardrails(
    agents: Sequence[AgentCalls], exposures: Sequence[Exposure], played: Sequence[Result]
) -> tuple[Guardrail, ...]:
    calls = np.array([one.calls for one in agents], float)

    def of_calls(measure: Measure, values: list[float]) -> Guardrail:
        return guard(measure, make_cells(exposures, np.array(values, float), plays=calls))

    def of_plays(measure: Measure, values: list[tuple[str, int, float]]) -> Guardrail:
        return guard(measure, cells_of(exposures, values, {}))

    failed = [(one.unit, one.stage, one.failed) for one in played if one.failed is not None]
    return (
        of_calls(BROKEN_OFF, [one.broken_off / one.calls for one in agents]),
        of_calls(CUT, [one.cut / one.calls for one in agents]),
        of_plays(FAILED, failed),
        of_plays(LOSSES, [(one.unit, one.stage, one.lost) for one in played]),
        of_calls(MEDIAN, [one.median_ms for one in agents]),
        of_calls(P95, [one.p95_ms for one in agents]),
    )

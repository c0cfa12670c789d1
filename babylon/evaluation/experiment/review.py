"""The review of an experiment: read its plays, compare the arms, decide and store the review.

Agents of one market move each other's prices, so an agent's result depends a little on the arms of
others (interference). Assigning agents rather than markets cannot remove that; the page says so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from statistics import fmean

import numpy as np

from babylon.core.settings import ExperimentSettings, WindowSettings
from babylon.core.windows import GAME_MINUTES, last_complete_window
from babylon.evaluation.experiment.agent_outcomes import Exposure, agent_outcomes, outcomes_of_plays
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
    sample_ratio,
)
from babylon.evaluation.experiment.play_results import PlayResult, finished, means, results
from babylon.evaluation.experiment.review_records import Guardrail, Review, SampleRatio
from babylon.store.connection import Connection, Store, clock_of, require_game_tables
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

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

__all__ = ["Review", "review"]


async def review(
    store: Store,
    windows: WindowSettings,
    rules: ExperimentSettings,
    experiment: str | None = None,
) -> Review | None:
    """Review the experiment with that salt, or the running one.

    Returns:
        The stored review. None if there is no such experiment.

    Raises:
        DatabaseError: There are no game tables and therefore no play.
    """
    require_game_tables(store)
    found = await find_experiment(store, experiment)
    if found is None:
        return None
    async with (
        store.pool.acquire() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
        store.game.acquire() as game,
        game.transaction(isolation="repeatable_read", readonly=True),
    ):
        look = await _look(connection, game, windows, rules, found)
    await keep_review(store, look.experiment, look.reviewed_at, look.decision, asdict(look))
    return look


async def _look(
    connection: Connection,
    game: Connection,
    windows: WindowSettings,
    rules: ExperimentSettings,
    found: Experiment,
) -> Review:
    now = (await clock_of(connection)).now
    agents = await agent_calls(connection, found)
    exposures = [
        Exposure(unit=one.unit, stage=one.stage, challenger=one.challenger) for one in agents
    ]
    played, excluded = await _played(connection, game, windows, found, now)
    since = found.began_at - timedelta(hours=windows.lookback_hours)
    before = await _before(game, found, played, since)
    pnl = [(play.unit, play.stage, play.pnl_usd) for play in played]
    outcomes = outcomes_of_plays(exposures, pnl, before, _hours(played))
    scores = await scores_of(connection, [play.trajectory_id for play in played])
    judged = [play for play in played if play.trajectory_id in scores]
    points = [(play.unit, play.stage, scores[play.trajectory_id]) for play in judged]
    # Also among the agents with a play: agents that drop out of one arm would bias the difference.
    everybody = _ratio(exposures, found)
    measured = {play.unit for play in played}
    with_play = _ratio([one for one in exposures if one.unit in measured], found)
    at_stake = fmean(play.balance_usd for play in played) if played else 0.0
    compared = difference(outcomes, at_stake=at_stake)
    guardrails = _guardrails(agents, exposures, played)
    hours = ((found.ended_at or now) - found.began_at) / timedelta(hours=1)
    evidence = Evidence(
        pnl=compared, ratios=(everybody, with_play), guardrails=guardrails, hours=hours
    )
    decision, reason = decide(evidence, rules)
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
        raw_pnl=difference(
            replace(outcomes, before=np.full(len(outcomes.before), np.nan)), at_stake=at_stake
        ),
        score=difference(outcomes_of_plays(exposures, points, {}, _hours(judged))),
        guardrails=guardrails,
        excluded=dict(excluded),
    )


async def _played(
    connection: Connection,
    game: Connection,
    windows: WindowSettings,
    found: Experiment,
    now: datetime,
) -> tuple[list[PlayResult], Counter[str]]:
    """Return the results of plays that count, and the number of others by reason.

    Only complete windows count: in an open one, the arm that plays faster would be ahead.
    """
    settled = now - timedelta(seconds=windows.grace_s)
    over = last_complete_window(settled, windows.minutes).end
    counting, excluded = finished(await plays(connection, game, found), over)
    played, without = await results(game, counting)
    excluded += without
    if pinned := await pinned_calls(connection, found):
        excluded["calls for a pinned version"] = pinned
    return played, excluded


def _hours(played: Sequence[PlayResult]) -> list[int]:
    """Return the plays' hours of the game, numbered in the order of time.

    The game's markets end with its hours, however long the windows of training are.
    """
    return [(play.start - EPOCH) // timedelta(minutes=GAME_MINUTES) for play in played]


async def _before(
    game: Connection, found: Experiment, played: Sequence[PlayResult], since: datetime
) -> dict[str, float]:
    units = sorted({play.unit for play in played})
    history, _ = await results(game, await plays_before(game, found, units, since))
    return means(history)


def _ratio(exposures: Sequence[Exposure], found: Experiment) -> SampleRatio:
    """Return the sample ratio over the agents' first stages. Exposures are ordered by stage."""
    first: dict[str, Exposure] = {}
    for one in exposures:
        first.setdefault(one.unit, one)
    shares = [found.shares[one.stage] for one in first.values()]
    return sample_ratio(shares, sum(one.challenger for one in first.values()))


def _crossed(agents: Sequence[AgentCalls]) -> int:
    arms: dict[str, set[bool]] = {}
    for one in agents:
        arms.setdefault(one.unit, set()).update({one.challenger, one.challenger ^ one.both})
    return sum(len(met) > 1 for met in arms.values())


def _guardrails(
    agents: Sequence[AgentCalls],
    exposures: Sequence[Exposure],
    played: Sequence[PlayResult],
) -> tuple[Guardrail, ...]:
    calls = np.array([one.calls for one in agents], float)

    def of_calls(measure: Measure, values: list[float]) -> Guardrail:
        return guard(measure, agent_outcomes(exposures, np.array(values, float), plays=calls))

    failed = [(one.unit, one.stage, one.failed) for one in played if one.failed is not None]
    lost = [(one.unit, one.stage, one.lost) for one in played]
    return (
        of_calls(BROKEN_OFF, [one.broken_off / one.calls for one in agents]),
        of_calls(CUT, [one.cut / one.calls for one in agents]),
        guard(FAILED, outcomes_of_plays(exposures, failed, {})),
        guard(LOSSES, outcomes_of_plays(exposures, lost, {}, _hours(played))),
        of_calls(MEDIAN, [one.median_ms for one in agents]),
        of_calls(P95, [one.p95_ms for one in agents]),
    )

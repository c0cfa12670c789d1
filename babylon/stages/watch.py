"""The watch over a window: its health when it is validated, and reward hacking when it is scored.

A policy that games its reward shows it twice. Its behaviour changes at once (endless holding, calls
broken on purpose, one sequence for all), or its scores part from its profit. Both are figures of
``babylon.quality.health``. An alarm of one of ``HACKS`` puts training on hold before the window
teaches anything. When a person ended that hold, the window is trained.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from babylon.core.errors import WindowNotReadyError
from babylon.core.trajectories import Trajectory
from babylon.core.types import Claim
from babylon.core.windows import Window, parse_window_id
from babylon.quality.health import HACKS, HISTORY, LEAST_HISTORY, PlayTally, find_alarms
from babylon.scoring.scorer import Score, ScoreOrRejection
from babylon.store import Store
from babylon.store.holds import hold, released_windows
from babylon.store.window_health import (
    Figures,
    HealthAlarm,
    WindowHealth,
    figures_before,
    get_health,
    store_health,
)

log = logging.getLogger(__name__)

AUTHOR = "reward watch"
ACCEPTED_DAYS = 7
_LEAST = 1e-9


async def measure_play(
    store: Store, claim: Claim, window: Window, tally: PlayTally, outcomes: int | None
) -> None:
    """Store the health of the window's data beside that of the last windows; log its alarms.

    Windows of recipes hold play that was measured before.
    """
    if window.recipe:
        return
    figures = tally.figures(outcomes)
    alarms = find_alarms(figures, await figures_before(store, window, HISTORY))
    health = WindowHealth(
        window_id=window.id, minutes=window.minutes, figures=figures, alarms=tuple(alarms)
    )
    await store_health(store, claim, health)
    for alarm in alarms:
        log.warning("window %s: %s", window.id, alarm.reason)


async def watch_scores(
    store: Store,
    claim: Claim,
    minutes: int,
    trajectories: Sequence[Trajectory],
    scores: Sequence[ScoreOrRejection],
    *,
    holds: bool,
) -> None:
    """Add the scores' figures to the window's health. With ``holds``, stop for reward hacking.

    Raises:
        WindowNotReadyError: the window looks like reward hacking, and training is on hold.
    """
    if "+" in claim.window_id:  # measured before, and its length may not be ``minutes``
        return
    window = parse_window_id(claim.window_id, minutes)
    health = await get_health(store, window.id)
    if health is None:
        return
    figures = {**health.figures, **score_figures(trajectories, scores)}
    alarms = find_alarms(figures, await figures_before(store, window, HISTORY))
    await store_health(store, claim, replace(health, figures=figures, alarms=tuple(alarms)))
    hacks = [alarm for alarm in alarms if alarm.figure in HACKS]
    if not hacks or not holds:
        return
    # A person who let such a window train has seen this change.
    accepted = await released_windows(store, AUTHOR, window.id, ACCEPTED_DAYS)
    for released in accepted:
        if (seen := await get_health(store, released)) is not None:
            hacks = _beyond(hacks, figures, seen.figures)
    if not hacks or window.id in accepted:
        return
    reasons = "; ".join(alarm.reason for alarm in hacks)
    reason = f"window {window.id} looks like reward hacking: {reasons}"
    await hold(store, AUTHOR, reason)
    raise WindowNotReadyError(
        f"{reason}; training is on hold: read the window's play, then `babylon windows resume`"
        f" trains it, or `babylon windows skip {window.id} --reason TEXT` leaves it out"
    )


def _beyond(hacks: Sequence[HealthAlarm], now: Figures, accepted: Figures) -> list[HealthAlarm]:
    """Return the alarms that stay beside the figures of a window that a person accepted."""
    still = {alarm.figure for alarm in find_alarms(now, [accepted] * LEAST_HISTORY)}
    known = accepted.keys() & still
    return [alarm for alarm in hacks if alarm.figure in known or alarm.figure not in accepted]


def score_figures(
    trajectories: Sequence[Trajectory], scores: Sequence[ScoreOrRejection]
) -> dict[str, float]:
    """Return how scores agree with profit within groups, and the share that has no score.

    A play with a failed step is no part of the correlation: its score pays for the failure, its
    profit does not, and shares of failed actions and malformed replies are figures of their own.
    Where too few plays have none, all are compared, and the figure has another name, so that it is
    compared with such windows only.
    """
    pairs = zip(trajectories, scores, strict=True)
    scored = [(play, score.value) for play, score in pairs if isinstance(score, Score)]
    sound = [one for one in scored if not any(payoff.failed for payoff in one[0].payoffs)]
    unscored = len(scores) - len(scored)
    figures = {"unscored_share": unscored / len(scores)} if scores else {}
    for name, plays in (("score_pnl_correlation", sound), ("score_pnl_correlation_all", scored)):
        if (correlation := _correlation(plays)) is not None:
            return figures | {name: correlation}
    return figures


def _correlation(plays: Sequence[tuple[Trajectory, float]]) -> float | None:
    """Return the correlation of score and profit within groups.

    ``None``: no group of three has both different scores and profits.
    """
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for trajectory, score in plays:
        groups[trajectory.scenario_id].append((score, trajectory.pnl_usd))
    weighted = weight = 0.0
    for pairs in groups.values():
        values = np.array(pairs) - np.mean(pairs, axis=0)
        norms = np.linalg.norm(values, axis=0)
        if len(pairs) > 2 and norms.min() > _LEAST:
            weighted += float(values[:, 0] @ values[:, 1] / norms.prod()) * (len(pairs) - 1)
            weight += len(pairs) - 1
    return weighted / weight if weight else None

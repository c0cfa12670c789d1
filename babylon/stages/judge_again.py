"""Judging a finished window once more, with market outcomes that were written after it was judged.

The scores are stored beside the first ones, under a recipe of the window. Nothing is trained: the
policy learnt from the first scores, and a trajectory moves a policy once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from statistics import fmean

from babylon.core.errors import WindowError, WindowNotReadyError
from babylon.core.home import Home
from babylon.core.metrics import scored_metrics
from babylon.core.settings import QualitySettings, WindowSettings
from babylon.core.types import Scored, Thinned
from babylon.core.windows import JUDGED_AGAIN, WindowState, parse_window_id
from babylon.stages.claim import claimed
from babylon.stages.collect import collect_window
from babylon.stages.validate import check_artifact
from babylon.store import Store
from babylon.store.late import without_taken_down
from babylon.store.scores import list_scores
from babylon.store.windows import get_window, set_state


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAgain:
    """The new scores of a window beside its first ones.

    ``window_id`` is the key of the new scores, ``outcomes`` the number of market outcomes that were
    read. ``changed`` of the ``trajectories`` got another score; ``before`` and ``after`` are means.
    """

    window_id: str
    outcomes: int
    trajectories: int
    changed: int
    before: float
    after: float


async def judge_again(
    store: Store,
    home: Home,
    windows: WindowSettings,
    quality: QualitySettings,
    window_id: str,
    score: Callable[..., Awaitable[Scored]],
) -> JudgedAgain:
    """Score the trajectories of a finished window that have a score, with the truth known now.

    Those that were taken down since are left out: no judge may read them.

    ``score`` is stage ``score`` under the settings: ``score(store, thinned=...)``. The window keeps
    the length with which it was trained.

    Raises:
        WindowError: the id is not a window's, or a recipe's.
        WindowNotReadyError: the window is not done, was never scored, or has no market outcomes.
        ScoringError: the scorer failed; no score was stored.
    """
    row = await get_window(store, window_id.partition("+")[0])
    window = parse_window_id(window_id, row.minutes if row else windows.minutes)
    if window.recipe not in ("", JUDGED_AGAIN):  # its own scores may still be trained
        raise WindowError(
            f"window {window_id} is a recipe's: only the play of {window.id} is judged again, name"
            " that window"
        )
    again = replace(window, recipe=JUDGED_AGAIN)
    first = {row.trajectory_id: row.score for row in await list_scores(store, window.id)}
    async with claimed(store, windows, again) as claim:
        allowed = await without_taken_down(store, first)
        collected = await collect_window(store, home, claim, again, scored=allowed)
        if not collected.outcomes:
            raise WindowNotReadyError(
                f"window {window.id} has no market outcomes yet: its scores would stay as they are"
            )
        artifact, tally, _ = await asyncio.to_thread(
            check_artifact, collected.artifact, again, home, quality
        )
        if not artifact.rows:
            raise WindowNotReadyError(f"no scored trajectory of window {window.id} is valid now")
        thinned = Thinned(
            claim=claim,
            artifact=artifact,
            agents=len(tally.eligible_agents),
            dropped=0,  # what dropout left out has no score
            outcomes=collected.outcomes,
        )
        scored = await score(store, thinned=thinned)
        scores = {row.trajectory_id: row.score for row in await list_scores(store, again.key)}
        await set_state(
            store,
            claim,
            WindowState.SKIPPED,
            reason=f"judged again with {scored.outcomes} market outcomes; nothing is trained",
            metrics=scored_metrics(scored),
            scored=scored,
        )
    return JudgedAgain(
        window_id=again.key,
        outcomes=collected.outcomes,
        trajectories=len(scores),
        changed=sum(score != first[name] for name, score in scores.items()),
        before=fmean(first[name] for name in scores),
        after=fmean(scores.values()),
    )

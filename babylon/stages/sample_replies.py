"""Replies sampled for an update (``OBJECTIVE=dpo``), before it starts.

The policy that the update starts from answers the window's most informative prompts again, a few
times each, through the engine that serves if there is one. What it answered is stored, so a run
that resumes trains on the same replies and buys no judgment twice. A decision of a trajectory that
was trained is not answered again.
"""

import asyncio
import logging
from collections.abc import Sequence

from babylon.core.learning_settings import reading_precision
from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.core.settings import JudgeSettings
from babylon.core.types import Scored
from babylon.core.windows import Window, parse_window_id
from babylon.evaluation.arena.engine_players import engine_table
from babylon.evaluation.preferences.choose import DecisionPoint, informative
from babylon.evaluation.preferences.draws import SampledReply, draws_of
from babylon.evaluation.preferences.engine_sample import engine_replies
from babylon.evaluation.preferences.play_on import value_replies
from babylon.evaluation.rebuild.recorded_windows import played_rows, rebuild_rows
from babylon.policies.checkpoint_files import context_of
from babylon.store.connection import Store
from babylon.store.replies import read_replies, store_replies
from babylon.store.windows import get_window
from babylon.training.backends.train_input import TrainInput

log = logging.getLogger(__name__)
ROWS = 4096  # of a window that are rebuilt, at most
Values = list[list[float] | None]


async def replies_for(
    work: TrainInput, scored: Scored, judge: JudgeSettings
) -> Sequence[PromptReplies]:
    """Return the parent's replies to prompts of the window, sampled now or by an earlier run.

    None for an objective without pairs. Prompts whose replies cannot be valued are left out, and
    the log counts them.

    Raises:
        ScoringError, ConfigError: ``PREFERENCE_VALUES=judge``, and the judge failed or is not set.
        ServingError: the engine that serves does not load or answer the parent.
    """
    preferences = work.settings.preferences
    if "dpo" not in work.settings.training.objective.split("+"):
        return []
    store, claim, version = work.store, scored.claim, work.parent.policy_version
    points = informative(work.rows, preferences.prompts)
    stored = await read_replies(
        store, claim.window_id, version, preferences.temperature, preferences.values
    )
    asked = {(point.trajectory_id, point.call.step) for point in points}
    known = [one for one in stored if (one.trajectory_id, one.step) in asked]
    most = max((len(one.replies) for one in known), default=0)
    if len(known) == len(points) and most >= preferences.replies:  # else less was asked for
        return _valued(known)
    found = await _sampled(work, points)
    texts = [[one.text for one in replies] for replies in found]
    if preferences.values == "judge":
        from babylon.scoring.judge.judge_replies import judge_replies  # imports openai, for 1 s

        values = await judge_replies(store, judge, scored, points, texts)
    else:
        values = await _simulated(store, claim.window_id, points, texts)
    sampled = [
        PromptReplies(
            trajectory_id=point.trajectory_id,
            step=point.call.step,
            prompt_token_ids=tuple(point.call.prompt_token_ids or ()),
            replies=tuple(
                ValuedReply(completion_token_ids=one.token_ids, value=value)
                for one, value in zip(replies, own or (), strict=own is not None)
            ),
            temperature=preferences.temperature,
            policy_version=version,
        )
        for point, replies, own in zip(points, found, values, strict=True)
    ]
    valued = _valued(sampled)
    log.info(
        "window %s: policy %d answered %d prompts again, %d of them could be valued",
        claim.window_id,
        version,
        len(points),
        len(valued),
    )
    await store_replies(store, claim, sampled, preferences.values)
    return valued


def _valued(sampled: Sequence[PromptReplies]) -> list[PromptReplies]:
    """Leave out what makes no pair. Sampled or stored, replies have one order: the digest of an
    update's progress depends on it."""
    pairs = [one for one in sampled if len(one.replies) > 1]
    return sorted(pairs, key=lambda one: (one.trajectory_id, one.step))


async def _sampled(work: TrainInput, points: Sequence[DecisionPoint]) -> list[list[SampledReply]]:
    settings, parent = work.settings, work.parent
    count, temperature = settings.preferences.replies, settings.preferences.temperature
    versions = [parent.policy_version]
    async with engine_table(work.store, settings.model.name, versions) as table:
        if table is not None:
            context = await asyncio.to_thread(context_of, parent.uri)
            draws = draws_of(points, count, temperature, settings.seed, context)
            return await engine_replies(table, parent.policy_version, points, draws)
    training = settings.training
    precision = reading_precision(training.tuning, training.base_precision)

    def in_process() -> list[list[SampledReply]]:
        # imported here, because torch takes seconds to import
        from babylon.evaluation.preferences.sample import sample_replies
        from babylon.training.likelihood import free_memory

        drawn = sample_replies(parent.uri, points, count, temperature, settings.seed, precision)
        free_memory()  # the update needs it
        return drawn

    return await asyncio.to_thread(in_process)


async def _simulated(
    store: Store, window_id: str, points: Sequence[DecisionPoint], texts: Sequence[Sequence[str]]
) -> Values:
    if store.game_problem:
        return [None] * len(points)
    row = await get_window(store, window_id)
    assert row is not None  # it is claimed
    window = played_window(window_id, row.minutes)
    rows = await played_rows(store, window, apart_from=(), most=ROWS)
    rebuilt = await asyncio.to_thread(rebuild_rows, rows)
    return await asyncio.to_thread(value_replies, rebuilt.scenarios, points, texts)


def played_window(window_id: str, minutes: int) -> Window:
    """Return the window that was played: a recipe trains on the rows of another one."""
    return parse_window_id(window_id.partition("+")[0], minutes)

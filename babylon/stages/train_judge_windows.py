"""The stored windows whose outcomes are known, and the training of a judge on them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from babylon.core.errors import ArtifactError
from babylon.core.home import Home
from babylon.core.learning_settings import TrainingSettings
from babylon.core.settings import JudgeSettings, ModelSettings
from babylon.core.trajectories import Trajectory
from babylon.scoring.judge.evidence import read_evidence
from babylon.scoring.judge.judgment import JudgeConfig, load_rubric
from babylon.scoring.judge.reported_validity import TrainedJudge, judged_groups
from babylon.scoring.judge.validity import JudgedGroup
from babylon.stages.train_judge import (
    JudgeTraining,
    OutcomeWindow,
    Progress,
    split_by_time,
    train_and_compare,
)
from babylon.store import Store
from babylon.store.judge_validity import judges_of
from babylon.store.published import read_withheld
from babylon.store.windows import list_windows
from babylon.training.base_model import resolve_base
from babylon.training.update_options import trainer_config, tuning_options


async def train_own_judge(
    store: Store,
    home: Home,
    model: ModelSettings,
    judge: JudgeSettings,
    training: TrainingSettings,
    target: Path,
    options: JudgeTraining,
    progress: Progress,
) -> TrainedJudge:
    """Train the base model on the scored windows, and compare it with the judges that scored them.

    Raises:
        WindowNotReadyError: there are too few windows.
        TrainingError: training diverged.
    """
    windows, served = await outcome_windows(store, home, progress)
    split_by_time(windows, options.later)  # raises before a base is made
    config = JudgeConfig(
        rubric=load_rubric(judge.rubric),
        context_tokens=judge.context_tokens,
        seed=options.seed,
    )
    base = await asyncio.to_thread(resolve_base, model.base, home.models, options.seed)
    return await train_and_compare(
        base,
        windows,
        target,
        config,
        # An answer has no steps that could be credited.
        replace(trainer_config(training, options.seed), credit="trajectory"),
        replace(options, weights=tuning_options(training), timeout_s=judge.timeout_s),
        home.logs / "judge.log",
        served,
        progress,
    )


async def outcome_windows(
    store: Store, home: Home, progress: Progress
) -> tuple[list[OutcomeWindow], dict[str, dict[str, Sequence[JudgedGroup]]]]:
    """Return the scored windows, and judge → window id → its opinions.

    Windows whose artifact is gone, and windows of recipes, are left out. So is play that was taken
    down since: the artifacts still hold it, and it teaches no judge either.
    """
    windows, withheld = [], await read_withheld(store)
    served: dict[str, dict[str, Sequence[JudgedGroup]]] = {}
    for row in await list_windows(store):
        if row.scored is None or "+" in row.window_id:
            continue
        try:
            judged, truth, _ = await asyncio.to_thread(read_evidence, home, row.scored.artifact)
        except ArtifactError:
            progress(f"window {row.window_id}: its artifact is gone")
            continue
        allowed = [one for one in judged if not withheld.covers(*_names(one.trajectory))]
        if allowed:
            play = OutcomeWindow(window_id=row.window_id, judged=tuple(allowed), truth=truth)
            windows.append(play)
        for known in await judges_of(store, row.window_id):
            own = served.setdefault(f"{known.by.judge}, {known.by.method}", {})
            own[row.window_id] = judged_groups(known)
    return windows, served


def _names(play: Trajectory) -> tuple[str, str]:
    return play.agent_id, play.trajectory_id

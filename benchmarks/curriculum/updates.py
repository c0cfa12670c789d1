"""The updates of a window of play, by the code of the real stages."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.learning_settings import PreferenceSettings, TrainingSettings
from babylon.core.preferences import PromptReplies, ValuedReply
from babylon.core.settings import EvaluationSettings
from babylon.evaluation.arena.fleet_promise import broken_promise, pairs_of
from babylon.evaluation.arena.match import compare
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import simulated
from babylon.evaluation.preferences.choose import informative
from babylon.evaluation.preferences.play_on import value_replies
from babylon.stages.words import decision_words
from babylon.store.fleet_pairs import FleetPair
from benchmarks.curriculum.hours import Hour, Moved, Window
from benchmarks.curriculum.play import recorded, seats_of

if TYPE_CHECKING:
    from babylon.training.preferences.objective import Preferences

RETURNED = "return"
CHANGES = ("promote", RETURNED)  # of the policy that plays the next hour
PREFERENCES = PreferenceSettings()


def own_update(
    window: Window,
    training: TrainingSettings,
    target: Path,
    asked: PreferenceSettings = PREFERENCES,
) -> Moved:
    """Train as the stage does. A window that teaches nothing leaves the policy as it is."""
    from babylon.training.update import update_checkpoint
    from babylon.training.update_options import trainer_config

    try:
        report: Any = update_checkpoint(
            window.policy,
            window.rows,
            target,
            tuning=training.tuning,
            config=trainer_config(training, window.seed, asked),
            staleness={0: 0},
            preferences=preferred(window, training, asked),
        ).report
    except (WindowNotReadyError, TrainingError) as error:
        print(f"not trained: {error}", flush=True)
        shutil.copytree(window.policy, target, dirs_exist_ok=True)
        return Moved()
    return Moved(
        kl_after=report.kl_after,
        entropy=getattr(report, "entropy", None),
        undone=getattr(report, "iterations_undone", 0),
    )


def gated_update(
    window: Window,
    training: TrainingSettings,
    target: Path,
    asked: PreferenceSettings = PREFERENCES,
) -> Moved:
    """Do the same, and keep the policy that played unless the arena's gate promotes the new one.

    The gate plays fresh worlds of the hour's rules, as it does where the fleet plays the simulator.
    As in the stage ``deploy``, the base model returns once the fleet's play shows that it earns
    more.
    """
    from babylon.evaluation.arena.players import checkpoint_player

    moved = own_update(window, training, target, asked)
    seed = f"curriculum:{window.level.name}:{window.seed}:{window.hour}"
    budget = EvaluationSettings().scenarios
    worlds = simulated(
        unseen_scenarios("gate", seed, budget, window.level.rules(window.hour)),
        seats_of(window.level),
    )
    old, new = (checkpoint_player(str(path), window.seed) for path in (window.policy, target))
    match = asyncio.run(compare(old, new, worlds))
    gain = match.challenger.mean_pnl - match.champion.mean_pnl
    kept, gate, pairs = window.policy, f"{match.ruling}: {match.reason}", _beside_base(window)
    lost = broken_promise([*_since_change(window.before), pairs])
    returns = lost is not None and (match.ruling != "promote" or -lost.mean > gain)
    if returns:
        kept, gate = window.base, f"{RETURNED}: the fleet earned {lost} a play over the base model"
    if returns or match.ruling != "promote":
        shutil.rmtree(target)
        shutil.copytree(kept, target)
    return replace(moved, gate=gate, pairs=pairs)


def _beside_base(window: Window) -> tuple[FleetPair, ...]:
    """Return the pairs of an hour, none if the base model itself played it."""
    from babylon.evaluation.arena.players import checkpoint_player

    changes = [hour.gate for hour in window.before if hour.gate.startswith(CHANGES)]
    if window.level.shared or not changes or changes[-1].startswith(RETURNED):
        return ()
    worlds = recorded(window.worlds, window.play)
    return tuple(pairs_of(worlds, checkpoint_player(str(window.base), window.seed)))


def _since_change(before: Sequence[Hour]) -> list[tuple[FleetPair, ...]]:
    """Return the pairs of the hours that the present policy played."""
    found: list[tuple[FleetPair, ...]] = []
    for hour in before:
        found = [] if hour.gate.startswith(CHANGES) else [*found, hour.pairs]
    return found


def preferred(
    window: Window, training: TrainingSettings, asked: PreferenceSettings
) -> "Preferences":
    """The objective, and the replies or words that it needs, made as the stages make them."""
    from babylon.evaluation.preferences.sample import sample_replies
    from babylon.training.preferences.objective import Preferences
    from babylon.training.update_options import preference_config

    objective, options = training.objective, preference_config(asked)
    if "sdpo" in objective.split("+"):
        words = tuple(decision_words(window.rows, window.play, {}))
        return Preferences(objective=objective, options=options, words=words)
    if "dpo" not in objective.split("+"):
        return Preferences(objective=objective, options=options)
    if window.level.shared:
        raise ValueError(
            f"objective={objective} plays recorded hours on from the start balance, but agents of"
            f" level {window.level.name} keep their wealth: choose another level or objective"
        )
    points = informative(window.rows, asked.prompts)
    found = sample_replies(
        str(window.policy), points, asked.replies, asked.temperature, window.seed
    )
    worlds = recorded(window.worlds, window.play)
    values = value_replies(worlds, points, [[one.text for one in own] for own in found])
    return Preferences(
        objective=objective,
        options=options,
        replies=tuple(
            PromptReplies(
                trajectory_id=point.trajectory_id,
                step=point.call.step,
                prompt_token_ids=tuple(point.call.prompt_token_ids or ()),
                replies=tuple(
                    ValuedReply(completion_token_ids=one.token_ids, value=value)
                    for one, value in zip(own, known, strict=True)
                ),
                temperature=asked.temperature,
                policy_version=0,
            )
            for point, own, known in zip(points, found, values, strict=True)
            if known
        ),
    )

"""A base model that reads words, which ``sdpo`` needs: a tiny model was never told anything."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from babylon.core.trajectories import Call, TrainingRow
from babylon.game.market.levels import CurriculumLevel
from babylon.stages.words import decision_words
from benchmarks.curriculum.play import AGENTS_A_WORLD, Sampler, played, scored, worlds_of


def reader(
    level: CurriculumLevel, base: Path, *, seed: int, hours: int, agents: int, directory: Path
) -> Path:
    """Teach the base model to give the best answer of the moment if words come with the prompt.

    Every call is also taught as it was, without words, so that the policy without them changes
    little.
    """
    from babylon.training.sft import fine_tune
    from babylon.training.teacher_prompt import teacher_prompt

    sampler = Sampler(str(base))
    lessons: list[TrainingRow] = []
    for hour in range(hours):
        worlds = worlds_of(level, seed, hour, agents // AGENTS_A_WORLD)
        play = played(sampler, worlds, seed, level.shared)
        rows = scored(play)
        words = {(one.trajectory_id, one.call): one.text for one in decision_words(rows, play, {})}
        answers = _best_answers(rows)
        for row in rows:
            for place, call in enumerate(row.calls):
                told = teacher_prompt(
                    sampler.policy.tokenizer,
                    call,
                    call.prompt_token_ids or (),
                    words[row.trajectory_id, place],
                    sampler.policy.context,
                )
                answer = answers[row.scenario_id, call.step].completion_token_ids
                read = msgspec.structs.replace(
                    call, prompt_token_ids=told, completion_token_ids=answer, logprobs=None
                )
                lesson = (read, call) if told else (call,)
                lessons.append(msgspec.structs.replace(row, calls=lesson))
    Random(seed).shuffle(lessons)
    target = directory / f"reader-{level.name}-{seed}"
    fine_tune(base, lessons, target, tuning="full", batch_size=16)
    return target


def _best_answers(rows: Sequence[TrainingRow]) -> dict[tuple[str, int], Call]:
    """(scenario id, step) → the call with the highest reward."""
    best: dict[tuple[str, int], tuple[float, Call]] = {}
    for row in rows:
        for call in row.calls:
            key, worth = (row.scenario_id, call.step), row.rewards[call.step]
            if key not in best or worth > best[key][0]:
                best[key] = worth, call
    return {key: call for key, (_, call) in best.items()}

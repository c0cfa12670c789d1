"""Training a judge of one's own on windows whose outcomes are known.

Windows are split by time: the earlier ones teach, the later ones are judged by the result. The
model sees what any judge sees, one trajectory at a time, and answers in the same JSON. What it
should say is the profit, and as score the share of earlier trajectories that earned less, in
tenths: the fewer values, the fewer examples does each need.

1. SFT: the prompts of the earlier windows with the right answers.
2. GRPO: the model samples several answers to a prompt. The reward of an answer is one minus the
   distance of its score from the right one, and 0 without a usable score. Samples are drawn from
   the policy alone. Under a grammar their probabilities would be others than those that the trainer
   computes, and a policy that writes no JSON would not learn to.

The checkpoint with the highest reward on earlier windows stays. On the later windows the embedded
engine serves it as ``JUDGE_MODEL_PATH`` does, with a grammar for the JSON.
"""

import asyncio
import shutil
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean

from babylon.core.errors import WindowNotReadyError
from babylon.core.learning_settings import Precision, reading_precision
from babylon.core.trajectories import Call, TrainingRow, Trajectory
from babylon.policies.checkpoint_files import context_of
from babylon.scoring.judge.group_prompts import GroupPrompts, prepare_readable
from babylon.scoring.judge.judge_client import MODEL, TEMPERATURE, JudgeClient, local_judge
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import (
    GroundTruth,
    JudgeConfig,
    JudgedTrajectory,
    Reads,
    fitting,
    write_reads,
)
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from babylon.scoring.judge.prompt import Prompt, UnusableReplyError, parse_reply
from babylon.scoring.judge.reported_validity import Contender, TrainedJudge
from babylon.scoring.judge.validity import JudgedGroup, agreement
from babylon.scoring.rewards.heuristic import heuristic
from babylon.serving.engine.loaded_policies import LoadedPolicy, load
from babylon.serving.engine.sampling import Request, Sampling
from babylon.training.grpo.config import TrainerConfig
from babylon.training.likelihood import free_memory
from babylon.training.memory_plan import model_config
from babylon.training.sft import fine_tune
from babylon.training.trainable import DEFAULT_OPTIONS, Tuning, TuningOptions
from babylon.training.update import update_checkpoint

_REPLY_TOKENS = 64
_BATCH = 64  # answers that are sampled together
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeWindow:
    """A window's trajectories with their outcomes (``pnl_usd``). Ids order windows by time."""

    window_id: str
    judged: tuple[JudgedTrajectory, ...]
    truth: GroundTruth


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTraining:
    """Options: share of windows that come later, passes of SFT, rounds of GRPO, answers each.

    ``weights``: form of an adapter, and precision of the weights below it. ``timeout_s``: limit of
    each answer about the later windows; the engine of this machine may be slow.
    """

    later: float = 0.3
    epochs: int = 6
    rounds: int = 2
    prompts: int = 48
    answers: int = 8
    batch_size: int = 4
    tuning: Tuning = "full"
    weights: TuningOptions = DEFAULT_OPTIONS
    timeout_s: float = 1800.0
    seed: int = 0

    @property
    def precision(self) -> Precision:
        """That of frozen weights, in training and where a checkpoint answers."""
        return reading_precision(self.tuning, self.weights.base_precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A prompt about one trajectory, its profit, and the score that is right."""

    trajectory_id: str
    agent_id: str
    prompt: Prompt
    profit_usd: float
    right: float

    @property
    def reply(self) -> str:
        """The right answer, in the requested JSON."""
        return f'{{"explanation":"{self.profit_usd:+.2f}","score":{self.right:.1f}}}'


def split_by_time(
    windows: Sequence[OutcomeWindow], later: float
) -> tuple[list[OutcomeWindow], list[OutcomeWindow]]:
    """Return the earlier and the later windows. No trajectory is in two windows: what a recipe took
    again, or was judged again, is in the last one, which knows the most outcomes.

    Raises:
        WindowNotReadyError: one of them would be empty.
    """
    ordered: list[OutcomeWindow] = []
    seen: set[str] = set()
    for window in sorted(windows, key=lambda window: window.window_id, reverse=True):
        own = tuple(one for one in window.judged if one.trajectory.trajectory_id not in seen)
        seen.update(one.trajectory.trajectory_id for one in own)
        if own:
            ordered.insert(0, replace(window, judged=own))
    cut = len(ordered) - round(later * len(ordered))
    early, late = ordered[:cut], ordered[cut:]
    if not early or not late:
        raise WindowNotReadyError(
            f"{len(ordered)} windows with known outcomes cannot be split in earlier and later"
            " ones: play more windows"
        )
    return early, late


Prepared = Sequence[tuple[GroupPrompts, Sequence[Trajectory]]]
"""The groups of several windows: their prompts, and the trajectories in the order of these."""


def prepare(windows: Sequence[OutcomeWindow], config: JudgeConfig) -> Prepared:
    """Return the groups of the windows. Trajectories that cannot be written down are left out."""
    found = []
    for window in windows:
        scenarios: dict[str, list[JudgedTrajectory]] = {}
        for one in window.judged:
            scenarios.setdefault(one.trajectory.scenario_id, []).append(one)
        for group in scenarios.values():
            prompts, lost = prepare_readable(group, window.truth, config)
            gone = {loss.trajectory_id for loss in lost}
            plays = [one.trajectory for one in group if one.trajectory.trajectory_id not in gone]
            if prompts is not None:
                found.append((prompts, plays))
    return found


def lessons(prepared: Prepared, repeat: int = 0) -> list[Lesson]:
    """Return a lesson for each trajectory. Each ``repeat`` has other labels in its prompts."""
    profits = sorted(one.pnl_usd for _, group in prepared for one in group)
    return [
        Lesson(
            trajectory_id=one.trajectory_id,
            agent_id=one.agent_id,
            prompt=prompts.prompt((item,), repeat),
            profit_usd=one.pnl_usd,
            right=bisect_left(profits, one.pnl_usd) / max(len(profits) - 1, 1),
        )
        for prompts, group in prepared
        for item, one in enumerate(group)
    ]


def train_judge(
    base: Path | str,
    windows: Sequence[OutcomeWindow],
    target: Path,
    config: JudgeConfig,
    trainer: TrainerConfig,
    options: JudgeTraining,
    progress: Progress = lambda line: None,
) -> tuple[list[float], list[float]]:
    """Train on earlier windows and write the best checkpoint. Blocking.

    Return the losses of SFT, and the mean rewards after SFT and after each round of GRPO.

    Raises:
        TrainingError: training diverged; ``target`` was not written.
    """
    random, prepared = Random(options.seed), prepare(windows, config)
    steps = [target.with_name(f".{target.name}-{step}") for step in range(options.rounds + 1)]
    try:
        rows = []
        for epoch in range(options.epochs):
            own = lessons(prepared, epoch)
            rows += [_chat(lesson) for lesson in random.sample(own, len(own))]
        taught = fine_tune(
            base,
            rows,
            steps[0],
            tuning=options.tuning,
            batch_size=options.batch_size,
            options=options.weights,
        )
        progress(f"SFT: {len(rows)} chats, loss {taught[0].loss:.3f} to {taught[-1].loss:.3f}")
        every, rewards = lessons(prepared, options.epochs), []
        asked = random.sample(every, min(options.prompts, len(every)))
        for number, path in enumerate(steps):
            # The same prompts each time, so that rewards can be compared.
            answered = sample_answers(
                str(path), asked, options.answers, options.seed + number, options.precision
            )
            rewards.append(fmean(row.score for row in answered))
            progress(
                f"reward {rewards[-1]:.3f} after {number} rounds of GRPO;"
                f" {fmean(row.score > 0 for row in answered):.1%} of the answers have a score"
            )
            if number < options.rounds:
                try:
                    update_checkpoint(
                        path,
                        answered,
                        steps[number + 1],
                        tuning=options.tuning,
                        config=trainer,
                        options=options.weights,
                    )
                except WindowNotReadyError as error:  # every answer is equally good
                    progress(f"GRPO ends: {error}")
                    break
        steps[rewards.index(max(rewards))].rename(target)
        write_reads(target, Reads(list_size=1, context_tokens=config.context_tokens))
        return [step.loss for step in taught], rewards
    finally:
        for path in steps:
            shutil.rmtree(path, ignore_errors=True)


def _chat(lesson: Lesson) -> TrainingRow:
    messages = tuple(dict[str, object](one) for one in lesson.prompt.messages)
    call = Call(step=0, messages=messages, response=lesson.reply)
    return _row(lesson, 0, 1.0, call)


def _row(lesson: Lesson, answer: int, score: float, call: Call) -> TrainingRow:
    return TrainingRow(
        trajectory_id=f"{lesson.trajectory_id}:{answer}",
        agent_id=lesson.agent_id,
        scenario_id=lesson.prompt.hash,  # answers to one prompt are compared
        score=score,
        calls=(call,),
    )


def sample_answers(
    path: str, asked: Sequence[Lesson], answers: int, seed: int, precision: Precision
) -> list[TrainingRow]:
    """Return answers of a checkpoint, with their tokens and rewards.

    It is read in this process: a judge in training is no policy that a gateway could load.
    """
    policy = load("judge", path, 0, precision)
    work = [(lesson, answer) for lesson in asked for answer in range(answers)]
    rows = []
    for start in range(0, len(work), _BATCH):
        part = work[start : start + _BATCH]
        rows += _sampled(policy, part, seed * 1_000_000 + start)
    del policy
    free_memory()  # the update needs it
    return rows


def _sampled(
    policy: LoadedPolicy, work: Sequence[tuple[Lesson, int]], seed: int
) -> list[TrainingRow]:
    requests = [
        Request(
            policy.prompt([dict(message) for message in lesson.prompt.messages]),
            Sampling(max_tokens=_REPLY_TOKENS, seed=seed + number),
        )
        for number, (lesson, _) in enumerate(work)
    ]
    completions = policy.generate(requests)
    rows = []
    for (lesson, answer), request, done in zip(work, requests, completions, strict=True):
        text = policy.decode(done.token_ids)
        call = Call(
            step=0,
            messages=tuple(dict[str, object](one) for one in lesson.prompt.messages),
            response=text,
            policy_version=0,
            prompt_token_ids=tuple(request.prompt_token_ids),
            completion_token_ids=tuple(done.token_ids),
            logprobs=tuple(done.logprobs),
        )
        rows.append(_row(lesson, answer, reward(lesson, text), call))
    return rows


def reward(lesson: Lesson, text: str) -> float:
    """Return one minus the distance of the score from the right one, 0 without a score."""
    try:
        (score,) = parse_reply(lesson.prompt, text).scores
    except UnusableReplyError:
        return 0.0
    return 1 - abs(score - lesson.right)


async def judged_by(
    path: Path,
    windows: Sequence[OutcomeWindow],
    config: JudgeConfig,
    log_file: Path,
    timeout_s: float,
) -> list[JudgedGroup]:
    """Serve a checkpoint with the embedded engine, and return its opinions of the windows."""
    groups: list[JudgedGroup] = []
    async with local_judge(path, log_file) as local:
        own = fitting(config, path, local.context_tokens)
        async with JudgeClient(
            model=MODEL,
            base_url=local.base_url,
            api_key=local.api_key,
            name=local.name,
            temperature=TEMPERATURE,
            timeout_s=timeout_s,
        ) as client:
            for window in windows:
                found = await judge_window(
                    client, window.judged, window.truth, own, ledger=MemoryJudgments()
                )
                groups += found.groups
    return groups


def compare(
    contenders: Mapping[str, Sequence[JudgedGroup]],
    windows: Sequence[OutcomeWindow],
    seed: int,
) -> tuple[Contender, ...]:
    """Return the agreement of each contender, of the heuristic and of a random judge."""
    random = Random(f"random judge:{seed}")
    plain = [
        [one.trajectory for one in window.judged if one.trajectory.scenario_id == scenario]
        for window in windows
        for scenario in dict.fromkeys(one.trajectory.scenario_id for one in window.judged)
    ]
    groups: dict[str, Sequence[JudgedGroup]] = {
        **contenders,
        "heuristic": [_group(own, [s.value for s in heuristic(own)]) for own in plain],
        "random": [_group(own, [random.random() for _ in own]) for own in plain],
    }
    return tuple(
        Contender(name=name, agreement=agreement(own), judged=sum(len(g.opinions) for g in own))
        for name, own in groups.items()
    )


def _group(trajectories: Sequence[Trajectory], opinions: Sequence[float]) -> JudgedGroup:
    outcomes = tuple(float(one.pnl_usd) for one in trajectories)
    return JudgedGroup(opinions=tuple(opinions), errors=(0.0,) * len(outcomes), outcomes=outcomes)


def _context(base: str) -> int:
    return context_of(base) or int(model_config(base).max_position_embeddings)


async def train_and_compare(
    base: Path | str,
    windows: Sequence[OutcomeWindow],
    target: Path,
    config: JudgeConfig,
    trainer: TrainerConfig,
    options: JudgeTraining,
    log_file: Path,
    served: Mapping[str, Mapping[str, Sequence[JudgedGroup]]] | None = None,
    progress: Progress = lambda line: None,
) -> TrainedJudge:
    """Train a judge on earlier windows, and compare it with others on the later ones.

    ``served``: judge → window id → its stored opinions.

    Raises:
        WindowNotReadyError: there are too few windows.
        TrainingError: training diverged.
    """
    early, late = split_by_time(windows, options.later)
    context = await asyncio.to_thread(_context, str(base))
    config = replace(config, list_size=1, context_tokens=min(config.context_tokens, context))
    losses, rewards = await asyncio.to_thread(
        train_judge, base, early, target, config, trainer, options, progress
    )
    # Nothing of the later windows was read until here.
    contenders: dict[str, Sequence[JudgedGroup]] = {
        "trained": await judged_by(target, late, config, log_file, options.timeout_s)
    }
    for judge, own in (served or {}).items():
        known = [group for window in late for group in own.get(window.window_id, ())]
        if known:
            contenders[judge] = known
    return TrainedJudge(
        checkpoint=str(target.resolve()),
        earlier=tuple(window.window_id for window in early),
        later=tuple(window.window_id for window in late),
        first_loss=losses[0],
        last_loss=losses[-1],
        rewards=tuple(rewards),
        contenders=compare(contenders, late, options.seed),
    )

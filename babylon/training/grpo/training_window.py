"""A logged window prepared for training: its trainable calls as one tree, cut into train steps.

Calls of policies that are too old are left out first, then trajectories without an advantage. The
remaining calls make one prefix tree. Every train step is a part of it.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from random import Random
from statistics import fmean

from babylon.training.grpo.advantage import MIN_GROUP_STD, call_masses, call_weights
from babylon.training.grpo.config import MAX_STALENESS, TrainerConfig
from babylon.training.grpo.credit import call_advantages
from babylon.training.grpo.prefix_tree import (
    PrefixTree,
    Sharing,
    compile_tree,
    find_sharing,
)
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory, teachable

logger = logging.getLogger(__name__)


class NothingToTrainError(ValueError):
    """Nothing can be trained: scores do not differ, or calls are too old, masked or unlogged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The trajectories of one optimiser update: their calls and the weight of each."""

    calls: Sequence[int]  # positions in TrainingWindow.calls
    tree: PrefixTree  # of these calls, in this order
    weights: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class TrainingWindow:
    """The calls that can move the policy. Made by :func:`compile_window`.

    C calls belong to N trajectories.
    """

    calls: Sequence[CallTokens]  # [C]
    trajectory_of: Sequence[int]  # [C], index of each call's trajectory
    staleness: Sequence[int | None]  # [C], in versions; None is unknown
    tree: PrefixTree  # of all calls
    trajectory_ids: Sequence[str]  # [N]
    groups: Sequence[str]  # [N]
    advantages: Sequence[float]  # [C]
    groups_without_signal: int
    calls_too_stale: int
    config: TrainerConfig

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Completion tokens of each call, ``[C]``."""
        return [len(call.completion) for call in self.calls]

    @cached_property
    def mean_length(self) -> float:
        """Mean completion in tokens: the constant C of the default call weight."""
        return fmean(self.lengths)

    @cached_property
    def signal(self) -> float:
        """Mean size of an advantage, the scale of the entropy term."""
        return fmean(map(abs, self.advantages))

    @property
    def tokens(self) -> int:
        """Number of completion tokens."""
        return sum(self.lengths)

    @cached_property
    def sharing(self) -> Sharing:
        """Tokens that the prompts share, and tokens that they could share."""
        return find_sharing(self.tree)

    @property
    def steps_an_iteration(self) -> int:
        """Number of train steps of one pass over the window."""
        return math.ceil(len(self.trajectory_ids) / self.config.trajectories_per_step)

    def steps(self, iteration: int) -> list[TrainStep]:
        """The train steps of one iteration, in an order determined by seed and iteration.

        Steps are made of whole groups where possible, because the calls of a group share the
        longest prefixes and their advantages sum to zero. The sizes of steps differ by at most one
        trajectory, because in a short last step few trajectories would move the policy as far as
        many.
        """
        random = Random(f"{self.config.seed}:{iteration}")
        members: dict[str, list[int]] = defaultdict(list)
        for trajectory, group in enumerate(self.groups):
            members[group].append(trajectory)
        order = list(members)
        random.shuffle(order)
        trajectories: list[int] = []
        for group in order:
            random.shuffle(members[group])
            trajectories += members[group]
        count, total = self.steps_an_iteration, len(trajectories)
        cuts = [total * step // count for step in range(count + 1)]
        return [self._step(trajectories[first:last]) for first, last in pairwise(cuts)]

    def mass_of_trajectories(self) -> list[float]:
        """Each trajectory's share of the window's loss before masks, relative to the mean share."""
        mass: dict[int, float] = defaultdict(float)
        shares = call_masses(self.lengths, self.trajectory_of, self.config.normaliser)
        for trajectory, share in zip(self.trajectory_of, shares, strict=True):
            mass[trajectory] += share
        return [mass[index] * len(mass) for index in sorted(mass)]

    @cached_property
    def _calls_of(self) -> Mapping[int, list[int]]:
        result: dict[int, list[int]] = defaultdict(list)
        for position, trajectory in enumerate(self.trajectory_of):
            result[trajectory].append(position)
        return result

    def _step(self, trajectories: Sequence[int]) -> TrainStep:
        positions = sorted(position for t in trajectories for position in self._calls_of[t])
        whole = len(positions) == len(self.calls)
        weights = call_weights(
            [self.lengths[position] for position in positions],
            [self.trajectory_of[position] for position in positions],
            self.config.normaliser,
            mean_length=self.mean_length,
            constant=self.config.bounds.dr_grpo_length,
        )
        return TrainStep(
            calls=positions,
            tree=self.tree if whole else self.tree.only(positions),
            weights=weights,
        )


def compile_window(
    trajectories: Sequence[ScoredTrajectory],
    config: TrainerConfig,
    *,
    staleness: Mapping[int, int] | None = None,
) -> TrainingWindow:
    """Drop stale calls, compute advantages, and compile the rest of the window into one tree.

    Args:
        staleness: policy version → number of updates between it and the parent.

    Raises:
        NothingToTrainError: every call is too stale, or no group has differing scores.
    """
    ages = staleness or {}
    allowed = min(config.max_staleness, MAX_STALENESS)
    fresh, too_stale = without_stale(trajectories, ages, allowed)
    # Without the stale ones: they must not shift the baseline of their group.
    advantage = call_advantages(fresh, config)
    kept = teachable(fresh, advantage)
    if not kept:
        raise NothingToTrainError(_why_nothing(fresh, too_stale, ages, allowed))
    calls = [call for t in kept for call in t.calls]
    groups = [t.group for t in kept]
    window = TrainingWindow(
        calls=calls,
        trajectory_of=[index for index, t in enumerate(kept) for _ in t.calls],
        staleness=[
            None if (version := call.policy_version) is None else ages.get(version)
            for call in calls
        ],
        tree=compile_tree(calls),
        trajectory_ids=[t.trajectory_id for t in kept],
        groups=groups,
        advantages=[
            value for t in kept for value in advantage.get(t.trajectory_id, [0.0] * len(t.calls))
        ],
        groups_without_signal=len({t.group for t in fresh if t.trajectory_id not in advantage}),
        calls_too_stale=too_stale.total(),
        config=config,
    )
    if advice := window.sharing.advice:
        logger.info("%s", advice)
    return window


def refuse_missing_logprobs(window: TrainingWindow) -> None:
    """Raise NothingToTrainError if too many calls have no behaviour logprobs."""
    allowed = window.config.max_missing_logprobs
    missing = sum(call.logprobs is None for call in window.calls) / len(window.calls)
    if missing > allowed:
        raise NothingToTrainError(
            f"{missing:.0%} of the calls have no logged logprobs, allowed are {allowed:.0%}: play"
            " through the gateway, or raise MAX_MISSING_LOGPROBS"
        )


def without_stale(
    trajectories: Sequence[ScoredTrajectory], ages: Mapping[int, int], allowed: int
) -> tuple[list[ScoredTrajectory], Counter[int]]:
    too_stale: Counter[int] = Counter()
    fresh = []
    for trajectory in trajectories:
        calls = []
        for call in trajectory.calls:
            version = call.policy_version
            if version is not None and ages.get(version, 0) > allowed:
                too_stale[version] += 1
            else:
                calls.append(call)
        if calls:
            fresh.append(replace(trajectory, calls=calls))
    return fresh, too_stale


def _why_nothing(
    fresh: Sequence[ScoredTrajectory],
    too_stale: Counter[int],
    ages: Mapping[int, int],
    allowed: int,
) -> str:
    stale = ", ".join(
        f"version {version} ({ages[version]} updates old, {count} calls)"
        for version, count in sorted(too_stale.items())
    )
    if not fresh and stale:
        youngest = min(ages[version] for version in too_stale)
        # a value above the constant has no effect, so do not advise it
        higher = f", or set MAX_STALENESS={youngest}" if youngest <= MAX_STALENESS else ""
        return (
            f"every call is from a policy older than MAX_STALENESS={allowed} allows:"
            f" {stale}; train windows sooner after they were played{higher}"
        )
    left_out = f"; left out as too old: {stale}" if stale else ""
    return (
        f"none of the {len({t.group for t in fresh})} groups ({len(fresh)} trajectories) has two"
        f" members with differing scores (a standard deviation below {MIN_GROUP_STD:g} is a tie):"
        f" let more agents play a scenario, or use a scorer with wider scores{left_out}"
    )

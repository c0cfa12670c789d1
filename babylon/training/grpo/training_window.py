"""A logged window made ready for training: what may be trained, compiled once, cut into steps.

Calls of a policy that is too old are left out first, then trajectories without an advantage. The
calls that remain become one prefix tree, of which every train step is a part.
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

from babylon.training.grpo.advantage import advantages, call_masses, call_weights
from babylon.training.grpo.config import MAX_STALENESS, TrainerConfig
from babylon.training.grpo.prefix_tree import Decode, PrefixTree, compile_tree
from babylon.training.grpo.training_input import ScoredTrajectory, TrainingCall

logger = logging.getLogger(__name__)


class NothingToTrainError(ValueError):
    """No group has differing scores, every call is too stale or masked, or mu is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Whole trajectories that make one optimiser update: their calls, and what each counts."""

    calls: Sequence[int]  # positions in Window.calls
    tree: PrefixTree  # of these calls, in this order
    weights: Sequence[float]
    trajectories: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """Every call that may move the policy. Made by :func:`compile_window`."""

    calls: Sequence[TrainingCall]
    tree: PrefixTree
    trajectory_ids: Sequence[str]  # by TrainingCall.trajectory
    groups: Sequence[str]  # by TrainingCall.trajectory
    groups_without_signal: int
    calls_too_stale: int
    staleness: Sequence[int | None]  # of each call, in versions; None is unknown
    config: TrainerConfig

    @cached_property
    def mean_length(self) -> float:
        """Mean completion, in tokens: the constant C of the default call weight."""
        return fmean(len(call.tokens.completion) for call in self.calls)

    @property
    def tokens(self) -> int:
        return sum(len(call.tokens.completion) for call in self.calls)

    @property
    def steps_an_iteration(self) -> int:
        return math.ceil(len(self.trajectory_ids) / self.config.trajectories_per_step)

    def with_logprobs(self, logprobs: Mapping[int, Sequence[float]]) -> "Window":
        """The same window with mu of some calls, by position, recomputed."""
        calls = [
            replace(c, tokens=replace(c.tokens, logprobs=logprobs[position], recomputed=True))
            if position in logprobs
            else c
            for position, c in enumerate(self.calls)
        ]
        return replace(self, calls=calls)

    def steps(self, iteration: int) -> list[TrainStep]:
        """The train steps of one iteration, in an order that seed and iteration decide.

        A step is made of whole groups as far as possible, because the calls of a group share the
        longest prefixes, and its advantages cancel. Steps are of equal size, give or take one: a
        short last one would let few trajectories move the policy as far as many.
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
        """What share of the window's loss each trajectory is, before any mask; 1 is the mean."""
        mass: dict[int, float] = defaultdict(float)
        for call, share in zip(
            self.calls, call_masses(self.calls, self.config.normaliser), strict=True
        ):
            mass[call.trajectory] += share
        return [mass[index] * len(mass) for index in sorted(mass)]

    @cached_property
    def _calls_of(self) -> Mapping[int, list[int]]:
        result: dict[int, list[int]] = defaultdict(list)
        for position, call in enumerate(self.calls):
            result[call.trajectory].append(position)
        return result

    def _step(self, trajectories: Sequence[int]) -> TrainStep:
        """The whole window is a step whose tree exists already; of a part it is cut out."""
        positions = sorted(position for t in trajectories for position in self._calls_of[t])
        whole = len(positions) == len(self.calls)
        weights = call_weights(
            [self.calls[position] for position in positions],
            self.config.normaliser,
            mean_length=self.mean_length,
            constant=self.config.bounds.dr_grpo_length,
        )
        return TrainStep(
            calls=positions,
            tree=self.tree if whole else self.tree.only(positions),
            weights=weights,
            trajectories=len(trajectories),
        )


def compile_window(
    trajectories: Sequence[ScoredTrajectory],
    config: TrainerConfig,
    *,
    staleness: Mapping[int, int] | None = None,
    decode: Decode | None = None,
) -> Window:
    """Gate, compare and compile a window.

    Args:
        staleness: policy version → how many updates it lies behind the parent.
        decode: token ids → text, for the advice on prompt order.

    Raises:
        NothingToTrainError: every call is too stale, or no group has differing scores.
    """
    ages = staleness or {}
    allowed = min(config.max_staleness, MAX_STALENESS)
    fresh, too_stale = _within(trajectories, ages, allowed)
    advantage = advantages(fresh, config.advantage)
    kept = [t for t in fresh if t.trajectory_id in advantage]
    if not kept:
        raise NothingToTrainError(_why_nothing(fresh, too_stale, ages, allowed))
    calls = [
        TrainingCall(tokens=call, trajectory=index, advantage=advantage[t.trajectory_id])
        for index, t in enumerate(kept)
        for call in t.calls
    ]
    groups = [t.group for t in kept]
    window = Window(
        calls=calls,
        tree=compile_tree([call.tokens for call in calls], decode=decode),
        trajectory_ids=[t.trajectory_id for t in kept],
        groups=groups,
        groups_without_signal=len({t.group for t in fresh}) - len(set(groups)),
        calls_too_stale=too_stale.total(),
        staleness=[
            None if (version := call.tokens.policy_version) is None else ages.get(version)
            for call in calls
        ],
        config=config,
    )
    if advice := window.tree.sharing.advice:
        logger.info("%s", advice)
    return window


def refuse_missing_logprobs(window: Window) -> None:
    """Raises NothingToTrainError when too many calls have no behaviour logprobs."""
    allowed = window.config.max_missing_logprobs
    missing = sum(call.tokens.logprobs is None for call in window.calls) / len(window.calls)
    if missing > allowed:
        raise NothingToTrainError(
            f"{missing:.0%} of the calls have no logged logprobs, allowed are {allowed:.0%}: play"
            " through the gateway, or raise MAX_MISSING_LOGPROBS"
        )


def _within(
    trajectories: Sequence[ScoredTrajectory], ages: Mapping[int, int], allowed: int
) -> tuple[list[ScoredTrajectory], Counter[int]]:
    """Trajectories without the calls of too old policies, and how many those were by version."""
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
        # beyond the most that is allowed a higher value changes nothing: it is no advice
        higher = f", or set MAX_STALENESS={youngest}" if youngest <= MAX_STALENESS else ""
        return (
            f"every call is of a policy further behind than MAX_STALENESS={allowed} allows:"
            f" {stale}; train windows sooner after they were played{higher}"
        )
    left_out = f"; left out as too old: {stale}" if stale else ""
    return (
        f"none of the {len({t.group for t in fresh})} groups ({len(fresh)} trajectories) has two"
        " members with differing scores: let more agents play a scenario, or use another"
        f" scorer{left_out}"
    )

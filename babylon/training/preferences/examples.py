"""The calls that preferences are learnt from, as one prefix tree cut into train steps.

A unit is never divided among steps: for DPO a prompt with its replies, for KTO a trajectory.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from random import Random
from statistics import fmean

from babylon.core.preferences import PromptReplies
from babylon.training.grpo.advantage import MIN_GROUP_STD
from babylon.training.grpo.config import MAX_STALENESS, TrainerConfig
from babylon.training.grpo.credit import call_advantages
from babylon.training.grpo.prefix_tree import PrefixTree, compile_tree
from babylon.training.grpo.training_input import CallTokens, ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError, without_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Calls that belong together, as positions in ``Examples.calls``.

    ``pairs``: (better, worse) among them. ``labels``: 1 or -1 for each call. One of both is empty.
    """

    trajectory_id: str
    calls: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    labels: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Examples:
    """U units with C calls together. All of them have pairs, or all have labels."""

    calls: Sequence[CallTokens]  # [C]
    tree: PrefixTree
    units: Sequence[Unit]  # [U]
    prompts_without_pairs: int = 0

    @cached_property
    def trajectory_ids(self) -> tuple[str, ...]:
        """The trajectories that the units are of, each once."""
        return tuple(dict.fromkeys(unit.trajectory_id for unit in self.units))

    @cached_property
    def label_weights(self) -> dict[int, float]:
        """Label → weight of its calls, so that good and bad replies have the same mass."""
        labels = [label for unit in self.units for label in unit.labels]
        return {y: len(labels) / (2 * labels.count(y)) for y in set(labels)}

    @cached_property
    def mismatched(self) -> PrefixTree:
        """The prompt of each call with the completion of the call before it, in a tree.

        A completion is cut where the two would be longer than any call: all of them fit the model.
        """
        others = [self.calls[-1], *self.calls[:-1]]
        longest = max(len(call.prompt) + len(call.completion) for call in self.calls)
        return compile_tree(
            [
                replace(
                    own, completion=other.completion[: longest - len(own.prompt)], logprobs=None
                )
                for own, other in zip(self.calls, others, strict=True)
            ]
        )

    def steps(self, config: TrainerConfig, iteration: int) -> list[list[Unit]]:
        """The units of each train step of an iteration. Seed and iteration decide the order."""
        order = list(self.units)
        Random(f"preferences:{config.seed}:{iteration}").shuffle(order)
        count = -(-len(order) // config.trajectories_per_step)
        cuts = [len(order) * step // count for step in range(count + 1)]
        return [order[first:last] for first, last in pairwise(cuts)]


def paired_examples(sampled: Sequence[PromptReplies], margin: float, context: int) -> Examples:
    """Pairs of the replies to one prompt whose values differ by more than ``margin``.

    Equal replies are one, with the mean of their values. Replies that exceed the model's
    ``context`` are left out.

    Raises:
        NothingToTrainError: no prompt has two replies of differing values.
    """
    calls: list[CallTokens] = []
    units = []
    for prompt in sampled:
        # All pairs of a prompt: they share its replies, so further pairs cost no forward pass.
        known = defaultdict[tuple[int, ...], list[float]](list)
        for reply in prompt.replies:
            if 0 < len(reply.completion_token_ids) <= context - len(prompt.prompt_token_ids):
                known[reply.completion_token_ids].append(reply.value)
        values = {tokens: fmean(found) for tokens, found in known.items()}
        pairs = [
            (a, b) if values[a] > values[b] else (b, a)
            for a, b in combinations(values, 2)
            if abs(values[a] - values[b]) > margin
        ]
        used = [tokens for tokens in values if any(tokens in pair for pair in pairs)]
        place = {tokens: len(calls) + number for number, tokens in enumerate(used)}
        calls += [_call(prompt, tokens) for tokens in used]
        if pairs:
            units.append(
                Unit(
                    trajectory_id=prompt.trajectory_id,
                    calls=tuple(place.values()),
                    pairs=tuple((place[better], place[worse]) for better, worse in pairs),
                )
            )
    if not sampled:  # more replies would have no values either
        raise NothingToTrainError(
            "no prompt of the window has two replies with a value: let agents play through the"
            " gateway, which records their tokens, and for rows of a live game, which the simulator"
            " cannot play again, set PREFERENCE_VALUES=judge"
        )
    if not units:
        raise NothingToTrainError(
            f"none of the {len(sampled)} prompts has two replies whose values differ by more than"
            f" {margin:g}: sample more replies (PREFERENCE_REPLIES), or lower PREFERENCE_MARGIN"
        )
    tree = compile_tree(calls)
    missing = len(sampled) - len(units)
    return Examples(calls=calls, tree=tree, units=units, prompts_without_pairs=missing)


def _call(prompt: PromptReplies, completion: tuple[int, ...]) -> CallTokens:
    return CallTokens(
        prompt=prompt.prompt_token_ids,
        completion=completion,
        logprobs=None,
        temperature=prompt.temperature,
        policy_version=prompt.policy_version,
        step=prompt.step,
    )


def labelled_examples(
    trajectories: Sequence[ScoredTrajectory],
    config: TrainerConfig,
    staleness: Mapping[int, int] | None = None,
) -> Examples:
    """Logged calls, good if they did better than the others of their group, else bad.

    A trajectory whose group has no other score is compared with the mean score of the window:
    unlike GRPO, KTO needs no group. Calls that did as well as the rest, within ``MIN_GROUP_STD``,
    are left out: rounding would label them. So are those of policies that are too old.

    Raises:
        NothingToTrainError: all scores are equal, or all calls are too old.
    """
    allowed = min(config.max_staleness, MAX_STALENESS)
    # Staleness first: a call that is left out must not shift what the others are compared with.
    fresh, _ = without_stale(trajectories, staleness or {}, allowed)
    compared = call_advantages(fresh, config)
    mean = fmean(t.score for t in fresh) if fresh else 0.0
    calls: list[CallTokens] = []
    units = []
    for one in fresh:
        gains = compared.get(one.trajectory_id, [one.score - mean] * len(one.calls))
        told = [
            (c, 1 if gain > 0 else -1)
            for c, gain in zip(one.calls, gains, strict=True)
            if abs(gain) >= MIN_GROUP_STD
        ]
        if told:
            places = tuple(range(len(calls), len(calls) + len(told)))
            calls += [call for call, _ in told]
            labels = tuple(label for _, label in told)
            units.append(Unit(trajectory_id=one.trajectory_id, calls=places, labels=labels))
    if not units or len({y for unit in units for y in unit.labels}) < 2:
        raise NothingToTrainError(
            f"none of the {len(trajectories)} trajectories is better or worse than the others, or"
            f" their calls are older than MAX_STALENESS={allowed} allows: let more agents play, or"
            " use another scorer"
        )
    return Examples(calls=calls, tree=compile_tree(calls), units=units)

"""The prompts of one group: the trajectories of one scenario in one window, as GRPO compares them.

A prompt takes at most 60 % of the judge's context. Ground truth gets up to a quarter of it, lines
shown to all agents up to another quarter, and the trajectories of a block share the rest evenly.
Facts that few of them know take up to a quarter of a trajectory's part.

Within that room, a trajectory's text takes about ``_SHARE`` of the tokens of its plain transcript,
so that a judge who reads it several times costs about as much as one who reads the transcript once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from babylon.core.errors import reason_of
from babylon.core.game_rows import scenario_market, scenario_ticker
from babylon.core.types import Rejection
from babylon.quality.decode import Reason
from babylon.quality.traded import market_in
from babylon.scoring.judge.canaries import plant
from babylon.scoring.judge.canary_results import Kind
from babylon.scoring.judge.condense import (
    NOTHING_SHARED,
    SharedLines,
    common_lines,
    condense,
    fit_lines,
    knowledge_lines,
    plain_tokens,
    render_common,
    shared_lines,
    truth_lines,
)
from babylon.scoring.judge.judgment import GroundTruth, JudgeConfig, JudgedTrajectory
from babylon.scoring.judge.prompt import Form, Prompt, Shown, build_prompt, count_tokens

Block = tuple[int, ...]
"""Trajectories of a group in the order in which a prompt shows them."""

_SMALLEST_LIST = 4  # trajectories in a listwise block, if long ones leave no room for six
_WHOLE = 10**9
_SHARE = 0.25  # of the plain transcript's tokens
_LEAST_WANTED = 120  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrompts:
    """A group that is ready to be judged in blocks of up to ``block_size``."""

    config: JudgeConfig
    window_id: str
    scenario_id: str
    shown: tuple[Shown, ...]
    truth: str
    common: str
    block_size: int
    shared: SharedLines = NOTHING_SHARED
    profits_usd: tuple[float, ...] = ()
    outcomes: tuple[Mapping[str, object], ...] = ()

    def planted(self, kind: Kind, item: int) -> "GroupPrompts":
        """Return the prompts with a canary of a kind, made of ``item``, as one more trajectory."""
        canary = plant(kind, item, self.shown, self.profits_usd, self.outcomes)
        return replace(self, shown=(*self.shown, canary))

    def prompt(self, block: Block, repeat: int = 0) -> Prompt:
        """Return the prompt of a block.

        Each repetition draws new labels. With the same labels, a deterministic judge would only
        repeat its reply.
        """
        several, texts = self.shared.stated([self.shown[item].text for item in block])
        shown = [replace(self.shown[item], text=t) for item, t in zip(block, texts, strict=True)]
        ids = ",".join(trajectory.trajectory_id for trajectory in shown)
        return build_prompt(
            _form(self.config),
            self.config.rubric,
            truth=self.truth,
            common=self.common,
            several=several,
            shown=shown,
            seed=f"{self.config.seed}:{self.window_id}:{self.scenario_id}:{ids}:{repeat}",
        )

    def seen(self, item: int) -> str:
        """Return the text that the judge is shown of one trajectory, with its ground truth."""
        return self.prompt((item,)).data


def prepare_group(
    group: Sequence[JudgedTrajectory], truth: GroundTruth, config: JudgeConfig
) -> GroupPrompts:
    """Return the prompts of one group. The same input gives the same prompts."""
    quarter = config.prompt_tokens // 4
    plain = [plain_tokens(judged) for judged in group]
    common = common_lines(group)
    share = max(round(_SHARE * sum(plain) / len(group)), _LEAST_WANTED)
    # Beyond its part, each trajectory's text refers to these lines as far as they fit.
    while common and count_tokens("\n".join(render_common(common))) > min(quarter, share):
        common = common[: len(common) // 2]
    shared, several = "\n".join(render_common(common)), shared_lines(group, common)
    shared_facts, alone = _facts([knowledge_lines(judged) for judged in group])
    words = sorted({word for judged in group for word in _markets(judged)})
    outcomes = fit_lines([*truth_lines(truth), *shared_facts], quarter, words)
    first = group[0].trajectory
    frame = [Shown(trajectory_id="", text="", own_truth="?")] if any(alone) else []
    bare = build_prompt(
        _form(config), config.rubric, truth=outcomes, common=shared, shown=frame, seed=""
    )
    overhead = sum(count_tokens(message["content"]) for message in bare.messages)
    wanted = [max(round(_SHARE * tokens), _LEAST_WANTED) for tokens in plain]
    whole = [
        condense(judged, common, _WHOLE, wanted=tokens, shared=several)
        for judged, tokens in zip(group, wanted, strict=True)
    ]
    sizes = [count_tokens(several.whole(text)) for text in whole]
    # The block size comes first: with fewer trajectories in a prompt, each is cut less.
    longest = max(sizes) + max(count_tokens("; ".join(lines)) for lines in alone) + _TAGS
    size = _block_size(config, longest, config.prompt_tokens - overhead)
    limit = (config.prompt_tokens - overhead) // size - _TAGS
    own = [fit_lines(lines, limit // 4, words, "; ") for lines in alone]
    rooms = [max(limit - count_tokens(facts), 0) for facts in own]
    texts = [
        text if tokens <= room else condense(judged, common, room, shared=several)
        for judged, text, tokens, room in zip(group, whole, sizes, rooms, strict=True)
    ]
    return GroupPrompts(
        config=config,
        window_id=first.window_id,
        scenario_id=first.scenario_id,
        shown=tuple(
            Shown(trajectory_id=judged.trajectory.trajectory_id, text=text, own_truth=facts)
            for judged, text, facts in zip(group, texts, own, strict=True)
        ),
        truth=outcomes,
        common=shared,
        block_size=size,
        shared=several,
        profits_usd=tuple(judged.trajectory.pnl_usd for judged in group),
        outcomes=truth.outcomes,
    )


def prepare_readable(
    group: Sequence[JudgedTrajectory], truth: GroundTruth, config: JudgeConfig
) -> tuple[GroupPrompts | None, list[Rejection]]:
    """Return the prompts of the trajectories that can be written down, and the rejected others."""
    try:
        return prepare_group(group, truth, config), []
    except Exception:  # whatever one trajectory holds must not cost the others; most are sound
        rejected = [loss for one in group if (loss := _unreadable(one, config))]
        if not rejected:
            raise
    gone = {loss.trajectory_id for loss in rejected}
    rest = [one for one in group if one.trajectory.trajectory_id not in gone]
    return (prepare_group(rest, truth, config) if rest else None), rejected


def _unreadable(one: JudgedTrajectory, config: JudgeConfig) -> Rejection | None:
    try:
        prepare_group([one], GroundTruth(), config)
    except Exception as error:
        return Rejection(
            trajectory_id=one.trajectory.trajectory_id,
            reason=Reason.NOT_READABLE,
            detail=f"the judge's text of it cannot be written: {reason_of(error)}",
        )
    return None


def _facts(known: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the facts that most of the trajectories with any have, and the others of each."""
    # Who knows nothing contradicts nobody, and a majority leaves no question two answers.
    most = sum(map(bool, known)) / 2
    counts = Counter(line for lines in known for line in dict.fromkeys(lines))
    shared = [line for line, count in counts.items() if count > most]
    return shared, [[line for line in lines if counts[line] <= most] for lines in known]


def _form(config: JudgeConfig) -> Form:
    return "list" if config.list_size > 1 else "one"


_TAGS = 40  # tokens around one trajectory


def _block_size(config: JudgeConfig, longest: int, room: int) -> int:
    """Return the number of trajectories that fit uncut, at least four for a listwise judge."""
    most = config.list_size
    if most <= _SMALLEST_LIST:
        return most
    return max(_SMALLEST_LIST, min(most, room // longest))


def _markets(judged: JudgedTrajectory) -> set[str]:
    """Return the names of the traded markets, also those that say the scenario."""
    found = [market_in(step.get("action", {}).get("parameters")) for step in judged.steps]
    names, scenario = set(filter(None, found)), judged.trajectory.scenario_id
    unique = [of(scenario, name) for of in (scenario_market, scenario_ticker) for name in names]
    return names.union(unique)

"""People as judges: which pairs they are asked, and what their answers say of trajectories."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from babylon.scoring.judge.calibrate import fit_preferences
from babylon.scoring.judge.canary_results import wilson
from babylon.scoring.judge.validity import JudgedGroup
from babylon.scoring.rewards.heuristic import TIE_USD
from babylon.store.people import PairAnswer

PEOPLE = "people"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonLine:
    """A person's answers. ``right``: share of pairs whose better one earned more, of ``decided``.

    ``low`` and ``high`` are its 95 % interval (Wilson).
    """

    person: str
    pairs: int
    decided: int
    right: float | None
    low: float
    high: float


def next_pair(
    groups: Sequence[JudgedGroup], asked: Set[frozenset[str]], seed: str
) -> tuple[str, str] | None:
    """Return the next pair of trajectory ids, in the order to show, ``None`` if none is left.

    First a ring, which compares each trajectory of a group twice. Then neighbours in the order of
    the judges' opinions, the closest first.
    """
    random = Random(seed)
    rings, neighbours = [], []
    for group in groups:
        ids = random.sample(group.trajectory_ids, len(group.trajectory_ids))
        rings += list(zip(ids, ids[1:] + ids[:1], strict=True)) if len(ids) > 1 else []
        ranked = sorted(zip(group.opinions, group.trajectory_ids, strict=False))
        neighbours += [
            (above - below, one, other) for (below, one), (above, other) in pairwise(ranked)
        ]
    closest = [(one, other) for _, one, other in sorted(neighbours)]
    for one, other in [*rings, *closest]:
        if one != other and frozenset((one, other)) not in asked:
            pair = (one, other)
            turned = Random(f"{seed}:{one}:{other}").random() < 0.5
            return pair[::-1] if turned else pair
    return None


def people_groups(
    answers: Sequence[PairAnswer], outcomes: Mapping[str, float]
) -> list[JudgedGroup]:
    """Return people's opinions of the trajectories of one window that have ``outcomes``.

    The answers of all people about a scenario are fitted together (Bradley-Terry).
    """
    by_scenario: dict[str, list[PairAnswer]] = defaultdict(list)
    for answer in answers:
        if answer.better in outcomes and answer.worse in outcomes:
            by_scenario[answer.scenario_id].append(answer)
    groups = []
    for own in by_scenario.values():
        ids = sorted({name for answer in own for name in (answer.better, answer.worse)})
        place = {name: at for at, name in enumerate(ids)}
        wins = [(place[a.better], place[a.worse], a.first == a.better) for a in own]
        estimate = fit_preferences(wins, len(ids))
        groups.append(
            JudgedGroup(
                opinions=tuple(map(float, estimate.scores)),
                errors=tuple(map(float, estimate.errors)),
                outcomes=tuple(outcomes[name] for name in ids),
                trajectory_ids=tuple(ids),
            )
        )
    return groups


def people_lines(answers: Sequence[PairAnswer], outcomes: Mapping[str, float]) -> list[PersonLine]:
    """Return how often each person's better trajectory was the one that earned more."""
    own: dict[str, list[PairAnswer]] = defaultdict(list)
    for answer in answers:
        own[answer.person].append(answer)
    lines = []
    for person, given in sorted(own.items()):
        gaps = [
            outcomes[a.better] - outcomes[a.worse]
            for a in given
            if a.better in outcomes and a.worse in outcomes
        ]
        decided = [gap for gap in gaps if abs(gap) >= TIE_USD]
        share = sum(gap > 0 for gap in decided) / len(decided) if decided else 0.5
        low, high = wilson(share, len(decided)) if decided else (0.0, 1.0)
        lines.append(
            PersonLine(
                person=person,
                pairs=len(given),
                decided=len(decided),
                right=share if decided else None,
                low=low,
                high=high,
            )
        )
    return lines

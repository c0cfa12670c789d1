"""Panels: the opinions of several judges, people among them, become one.

The opinions u of M judges about the trajectories of a group, each centred and in units of its own
spread, tell the centred outcome z. The best linear guess of z weighs them by

    w = S^-1 b,    S = E[u u^T],    b = E[u z]

so two judges that err together share their weight (Bates and Granger 1969, "The combination of
forecasts", with the covariance of all). S and b are learned from earlier windows.
Pseudo-observations stand for a prior: each judge agrees with outcomes as usual, and half of an
error's variance is common to all. No weight is negative: a judge that is worse than chance is left
out.

A window is weighed only by what windows before it have shown, so the panel's evidence
(``babylon.scoring.judge.validity``) is as valid as one judge's.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import sqrt

import numpy as np

from babylon.scoring.judge.calibrate import Floats
from babylon.scoring.judge.validity import JudgedGroup

_PRIOR_TRAJECTORIES = 12.0
_PRIOR_CORRELATION, _COMMON_ERROR = 0.8, 0.5
_USUAL_SPREAD = 0.2  # standard deviation of opinions within a group


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelGroup:
    """A group as several judges see it: judge → trajectory id → (opinion, standard error)."""

    outcomes: Mapping[str, float]
    opinions: Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """The panel's opinion of a group, and the ``weights`` of the judges that gave one.

    ``disagreement`` is one minus the mean correlation of two judges' opinions, ``None`` if no two
    judged the same three trajectories.
    """

    group: JudgedGroup
    weights: Mapping[str, float]
    disagreement: float | None


@dataclass(slots=True)
class Panel:
    """The learned agreement of judges with outcomes and with each other."""

    judges: Sequence[str]
    _seen: Floats = field(init=False)  # pairs of judges: weight of what was seen
    _products: Floats = field(init=False)  # of opinions in standard units
    _agreed: Floats = field(init=False)
    _spreads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        count, error = len(self.judges), 1 - _PRIOR_CORRELATION**2
        common = _PRIOR_CORRELATION**2 + _COMMON_ERROR * error
        self._seen = np.full((count, count), _PRIOR_TRAJECTORIES)
        self._products = _PRIOR_TRAJECTORIES * (common + (1 - common) * np.eye(count))
        self._agreed = np.full(count, _PRIOR_TRAJECTORIES * _PRIOR_CORRELATION)

    def weights(self) -> dict[str, float]:
        """Return judge → weight. They sum to one."""
        covariance, target = self._products / self._seen, self._agreed / np.diag(self._seen)
        kept = list(range(len(self.judges)))
        found = np.zeros(len(self.judges))
        while kept:  # without the worst, until no weight is negative
            # Pairs were seen in different numbers, so the matrix may need a ridge.
            part = covariance[np.ix_(kept, kept)] + 0.01 * np.eye(len(kept))
            solved = np.linalg.solve(part, target[kept])
            if (solved >= 0).all():
                found[kept] = solved
                break
            kept.pop(int(np.argmin(solved)))
        total = float(found.sum())
        even = 1 / len(self.judges)
        return {
            name: float(weight) / total if total > 0 else even
            for name, weight in zip(self.judges, found, strict=True)
        }

    def learn(self, group: PanelGroup) -> None:
        """Learn from a group whose outcomes are known."""
        ids = list(group.outcomes)
        outcomes = np.array([group.outcomes[name] for name in ids])
        if len(ids) < 2 or float(outcomes.std()) < 1e-9:
            return
        units: dict[int, dict[str, float]] = {}
        for number, judge in enumerate(self.judges):
            given = {n: g[0] for n, g in group.opinions.get(judge, {}).items() if n in ids}
            if len(given) > 1:
                self._spreads[judge].append(float(np.std(list(given.values()))))
                units[number] = self._in_units(judge, given)
        for a, own in units.items():
            z = np.array([group.outcomes[name] for name in own])
            if float(z.std()) < 1e-9:
                continue
            z = (z - z.mean()) / z.std()
            self._agreed[a] += float(z @ np.array(list(own.values())))
            for b, other in units.items():
                both = [name for name in own if name in other]
                self._products[a, b] += sum(own[name] * other[name] for name in both)
                self._seen[a, b] += len(both)

    def combine(self, group: PanelGroup) -> Combined:
        """Return the weighted opinion of each trajectory that any judge has an opinion of.

        The opinions of a judge that lacks a trajectory count for the others.
        """
        weights = self.weights()
        given = {
            judge: {name: one[0] for name, one in opinions.items() if name in group.outcomes}
            for judge, opinions in group.opinions.items()
        }
        given = {judge: own for judge, own in given.items() if own}
        units = {judge: self._in_units(judge, own) for judge, own in given.items()}
        spread = float(np.mean([self._spread(judge) for judge in given]))
        centre = float(np.mean([np.mean(list(own.values())) for own in given.values()]))
        ids = [name for name in group.outcomes if any(name in own for own in given.values())]
        scores, errors = [], []
        for name in ids:
            known = [judge for judge in given if name in given[judge]]
            # The share of a judge that lacks the trajectory goes to the others.
            total = sum(weights[judge] for judge in known)
            shares = {j: weights[j] / total if total > 0 else 1 / len(known) for j in known}
            scores.append(centre + spread * sum(s * units[j][name] for j, s in shares.items()))
            noise = [
                share * group.opinions[judge][name][1] / self._spread(judge)
                for judge, share in shares.items()
            ]
            errors.append(spread * sqrt(sum(one**2 for one in noise)))
        floor, top = min(0.0, *scores, 0.0), max(1.0, *scores, 1.0)
        return Combined(
            group=JudgedGroup(
                opinions=tuple((score - floor) / (top - floor) for score in scores),
                errors=tuple(error / (top - floor) for error in errors),
                outcomes=tuple(group.outcomes[name] for name in ids),
                trajectory_ids=tuple(ids),
            ),
            weights={judge: weights[judge] for judge in given},
            disagreement=_disagreement(list(given.values())),
        )

    def _spread(self, judge: str) -> float:
        own = self._spreads[judge]
        return max((_USUAL_SPREAD + sum(own)) / (1 + len(own)), 1e-6)

    def _in_units(self, judge: str, given: Mapping[str, float]) -> dict[str, float]:
        mean, spread = float(np.mean(list(given.values()))), self._spread(judge)
        return {name: (value - mean) / spread for name, value in given.items()}


def _disagreement(opinions: Sequence[Mapping[str, float]]) -> float | None:
    found = []
    for one, other in combinations(opinions, 2):
        both = [name for name in one if name in other]
        a, b = np.array([one[n] for n in both]), np.array([other[n] for n in both])
        if len(both) > 2 and a.std() > 1e-9 and b.std() > 1e-9:
            found.append(1 - float(np.corrcoef(a, b)[0, 1]))
    return float(np.mean(found)) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelJudgment:
    """The panel's opinions of a window, and of the windows before it by what was known then."""

    groups: tuple[Combined, ...]
    before: tuple[tuple[JudgedGroup, ...], ...]
    weights: Mapping[str, float]


def judge_together(
    judges: Sequence[str],
    before: Sequence[Sequence[PanelGroup]],
    groups: Sequence[PanelGroup],
) -> PanelJudgment:
    """Combine the opinions of a window by what earlier windows, the oldest first, have shown."""
    panel, earlier = Panel(judges), []
    for window in before:
        known = [group for group in window if any(group.opinions.values())]
        earlier.append(tuple(panel.combine(group).group for group in known))
        for group in known:
            panel.learn(group)
    return PanelJudgment(
        groups=tuple(panel.combine(group) for group in groups),
        before=tuple(earlier),
        weights=panel.weights(),
    )


def side_by_side(own: Mapping[str, Sequence[JudgedGroup]]) -> list[PanelGroup]:
    """Join what several judges said of one window (judge → its groups) by trajectory.

    Judges lose different trajectories, so groups are the same if they share one.
    """
    groups: list[tuple[dict[str, float], dict[str, dict[str, tuple[float, float]]]]] = []
    for judge, judged in own.items():
        for one in judged:
            ids = one.trajectory_ids
            outcomes = dict(zip(ids, one.outcomes, strict=bool(ids)))
            said = {
                name: (opinion, error)
                for name, opinion, error in zip(ids, one.opinions, one.errors, strict=bool(ids))
            }
            for known, opinions in groups:
                if known.keys() & outcomes.keys():
                    known.update(outcomes)
                    opinions[judge] = said
                    break
            else:
                if said:
                    groups.append((outcomes, {judge: said}))
    return [PanelGroup(outcomes=known, opinions=opinions) for known, opinions in groups]

"""Stage ``dropout``: thin a large window before it is judged (not neural dropout).

With n trajectories and a target of t < n, a share of ``min(max_dropout, 1 - t / n)`` is dropped,
rounded down. The choice depends only on the window, the seed and the trajectory ids. Each agent
loses about the same share of its own trajectories: they are put in random order and spread evenly
over [0, 1) with a random offset (systematic sampling), and the lowest positions of the window are
dropped first. A group keeps two trajectories. As many agents as a window needs keep one each.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import polars as pl

from babylon.core.artifacts import read_artifact, rewrite_artifact
from babylon.core.settings import Settings
from babylon.core.types import Thinned, Validated
from babylon.scoring.judge.evidence import saved_tokens

MIN_GROUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutCandidate:
    """A trajectory that may be dropped. Its group is its scenario in this window."""

    trajectory_id: str
    agent_id: str
    scenario_id: str


def thin_window(settings: Settings, validated: Validated) -> Thinned:
    """Drop whole trajectories. If none is dropped, the artifact stays the same.

    Dropped trajectories become an artifact of their own. Nothing is trained on them, so they are
    held-out play for checking a checkpoint. Blocking.
    """
    rows = read_artifact(
        settings.home, validated.artifact, ["trajectory_id", "agent_id", "scenario_id"]
    )
    candidates = [DropoutCandidate(**row) for row in rows.iter_rows(named=True)]
    # The key holds nothing of this run: a run that resumes must keep the same trajectories.
    dropped = choose_dropped(
        candidates,
        target=settings.quality.target_trajectories,
        max_dropout=settings.quality.max_dropout,
        min_agents=settings.windows.min_agents,
        key=f"{validated.claim.window_id}/{settings.seed}",
    )
    artifact, held_out = validated.artifact, None
    if dropped:
        gone = pl.col("trajectory_id").is_in(sorted(dropped))
        held_out = rewrite_artifact(
            settings.home, artifact, lambda frame: frame.filter(gone), stage="held-out"
        )
        artifact = rewrite_artifact(
            settings.home, artifact, lambda frame: frame.filter(~gone), stage="thinned"
        )
    agents = {c.agent_id for c in candidates if c.trajectory_id not in dropped}
    return Thinned(
        claim=validated.claim,
        artifact=artifact,
        agents=len(agents),
        dropped=len(dropped),
        held_out=held_out,
        outcomes=validated.outcomes,
        saved_judge_tokens=saved_tokens(
            settings.scoring.scorer, settings.judge, settings.home, validated.artifact, dropped
        ),
    )


def drop_count(count: int, *, target: int, max_dropout: float) -> int:
    """Return how many of ``count`` trajectories to drop, before groups and agents are spared."""
    most = math.floor(max_dropout * count + 1e-9)  # 0.29 * 100 is 28.999999999999996
    return max(0, min(count - target, most))


def choose_dropped(
    candidates: Iterable[DropoutCandidate],
    *,
    target: int,
    max_dropout: float,
    min_agents: int,
    key: str,
) -> frozenset[str]:
    """Return the trajectory ids to drop. The order of ``candidates`` does not matter.

    No group falls below two trajectories, and none of the last ``min_agents`` agents loses its last
    trajectory, even if more than the target are left.
    """
    everyone = list(candidates)
    wanted = drop_count(len(everyone), target=target, max_dropout=max_dropout)
    position = _positions(everyone, key)
    of_agent = Counter(candidate.agent_id for candidate in everyone)
    in_group = Counter(candidate.scenario_id for candidate in everyone)
    dropped: set[str] = set()
    for candidate in sorted(everyone, key=lambda c: (position[c.trajectory_id], c.trajectory_id)):
        if len(dropped) >= wanted:
            break
        last_of_agent = of_agent[candidate.agent_id] == 1
        # Scores are compared within a group, so a lone trajectory could not be trained on.
        if in_group[candidate.scenario_id] <= MIN_GROUP or (
            last_of_agent and len(of_agent) <= min_agents
        ):
            continue
        dropped.add(candidate.trajectory_id)
        in_group[candidate.scenario_id] -= 1
        of_agent[candidate.agent_id] -= 1
        if last_of_agent:
            del of_agent[candidate.agent_id]
    return frozenset(dropped)


def _positions(candidates: list[DropoutCandidate], key: str) -> Mapping[str, float]:
    """Return trajectory id → position in [0, 1) among the trajectories of its agent."""
    agents: dict[str, list[str]] = {}
    for candidate in candidates:
        agents.setdefault(candidate.agent_id, []).append(candidate.trajectory_id)
    return {
        trajectory_id: (rank + _random(key, "agent", agent)) / len(ids)
        for agent, ids in agents.items()
        for rank, trajectory_id in enumerate(sorted(ids, key=lambda i: (_random(key, i), i)))
    }


def _random(*parts: str) -> float:
    """Return a uniform number in [0, 1), the same on every machine."""
    digest = blake2b("/".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64

"""What a judge reads of a window's artifact: steps as the game recorded them, and ground truth."""

from collections.abc import Iterator
from typing import Any

import msgspec

from babylon.core.artifacts import read_artifact
from babylon.core.trajectories import read_trajectories
from babylon.core.types import Artifact
from babylon.scoring.judge.judgment import GroundTruth, JudgedTrajectory


class _Knowledge(msgspec.Struct, frozen=True):
    game_knowledge: dict[str, Any] = {}
    market_outcomes: list[dict[str, Any]] = []


def read_evidence(artifact: Artifact) -> tuple[list[JudgedTrajectory], GroundTruth]:
    """The trajectories of a validated artifact, in its order, and the window's outcomes."""
    trajectories = read_trajectories(artifact)
    knowledge, steps = list(_knowledge(artifact)), list(_steps(artifact))
    judged = [
        JudgedTrajectory(trajectory=trajectory, steps=own, knowledge=known.game_knowledge)
        for trajectory, own, known in zip(trajectories, steps, knowledge, strict=True)
    ]
    outcomes = knowledge[0].market_outcomes if knowledge else []  # the same in every row
    return judged, GroundTruth(outcomes=tuple(outcomes))


def _knowledge(artifact: Artifact) -> Iterator[_Knowledge]:
    column = read_artifact(artifact, ["knowledge_json"])["knowledge_json"]
    return (msgspec.json.decode(text, type=_Knowledge) for text in column)


def _steps(artifact: Artifact) -> Iterator[tuple[dict[str, Any], ...]]:
    column = read_artifact(artifact, ["game_json"])["game_json"]
    return (msgspec.json.decode(text, type=tuple[dict[str, Any], ...]) for text in column)

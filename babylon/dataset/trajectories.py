"""The table ``trajectories``: one scored play a row, scrubbed, ground truth in its own columns.

The prompts, replies and token ids are those of validation; actions and results come from the game's
steps. Verdicts on trades and everything else that the game derived from outcomes is left out of the
steps: it is in ``outcome_rewards`` and ``ground_truth_json``, which no policy may read. The judge
saw it, so its reasons belong to them.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from babylon.core.artifacts import iter_artifact
from babylon.core.game_rows import players_of
from babylon.core.home import Home
from babylon.core.trajectories import Call
from babylon.core.types import Artifact, Scored
from babylon.dataset.messages import call_column
from babylon.dataset.scores import ScoreColumns
from babylon.dataset.scrub import ScrubError, cleaned, found, texts_of
from babylon.dataset.secret_rules import HEX_KEY
from babylon.quality.correctness import StepReward
from babylon.store.published import Withheld

log = logging.getLogger(__name__)
_COLUMNS = (
    "trajectory_id", "agent_id", "window_id", "scenario_id", "start", "end", "pnl_usd", "wins",
    "trades", "actions", "score", "calls_json", "game_json", "knowledge_json", "step_rewards_json",
)  # fmt: skip
_IDS = ("trajectory_id", "agent_id", "window_id", "scenario_id")
_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")


class _State(msgspec.Struct, rename="camel"):
    agent_balance: object = None
    market: msgspec.Raw = msgspec.Raw(b"null")


class _Action(msgspec.Struct, rename="camel"):
    action_type: str
    success: bool
    parameters: object = None
    result: object = None
    error: object = None


class PublishedStep(msgspec.Struct, rename="camel"):
    """The parts of a game's step that are published. All others are skipped while decoding.

    Validation does not read the fields of type ``object``, so a game may write anything there.
    """

    step_number: int
    action: _Action
    environment_state: _State = msgspec.field(default_factory=_State)
    timestamp: object = None
    reward: object = None


class _Knowledge(msgspec.Struct):
    game_knowledge: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(frozen=True, slots=True)
class Consent:
    """Patterns of agents (``*`` matches any text)."""

    patterns: tuple[str, ...]

    def covers(self, agent_id: str) -> bool:
        # of the wildcards of fnmatch, only `*`: `team[1]` names itself
        plain = (pattern.replace("[", "[[]").replace("?", "[?]") for pattern in self.patterns)
        return any(fnmatchcase(agent_id, pattern) for pattern in plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows that may be written, and how.

    ``agents``: patterns of the agents that consented; None: all. ``safe`` is False for a file that
    stays on this machine: nothing is scrubbed or withheld.
    """

    withheld: Withheld = field(default_factory=Withheld)
    agents: Consent | None = None
    safe: bool = True

    def takes(self, agent_id: str, trajectory_id: str = "") -> bool:
        if not self.safe:
            return True
        consented = self.agents is None or self.agents.covers(agent_id)
        return consented and not self.withheld.covers(agent_id, trajectory_id)


def trajectory_rows(
    home: Home, scored: Scored, scores: Mapping[str, ScoreColumns], selection: Selection
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in portions. A row that cannot be made safe is logged and left out.

    The prompts of a shared market show what its other players wrote. A row is left out, too, if one
    of them did not agree, or if the play of one was taken down.
    """
    calls = msgspec.json.Decoder(tuple[Call, ...])
    steps = msgspec.json.Decoder(list[PublishedStep])
    rewards = msgspec.json.Decoder(list[StepReward])
    knowledge = msgspec.json.Decoder(_Knowledge)
    absent = _absent(home, scored.artifact, selection)
    compared = {scenario for scenario, _ in absent}
    if scored.held_out and selection.withheld.trajectories:  # not judged, but others saw it
        absent |= _absent(home, scored.held_out, selection)
    for frame in iter_artifact(home, scored.artifact, _COLUMNS):
        portion = []
        for row in frame.iter_rows(named=True):
            scenario = row["scenario_id"]
            if (scenario, row["agent_id"]) in absent:
                continue
            game = steps.decode(row.pop("game_json"))
            players = players_of(game[0].environment_state.market) if game else []
            if any((scenario, one) in absent or not selection.takes(one) for one in players):
                continue
            played = [_shown(call, selection) for call in calls.decode(row.pop("calls_json"))]
            row |= scores.get(row["trajectory_id"], {})
            if scenario in compared:  # a judge of several plays writes of the absent one too
                row["score_reasons"] = []
            row |= {
                "window_id": scored.claim.window_id,  # with the recipe, as in the other tables
                "policy_versions": sorted(
                    {c.policy_version for c in played if c.policy_version is not None}
                ),
                "steps": [_step(step) for step in game],
                "calls": [call_column(call) for call in played],
                "token_ids_exact": not any(call.retokenized for call in played),
                "players": players,
                "scrubbed": [],
                "outcome_rewards": [
                    {"step": one.step_number, "reward": one.reward, "correct": one.correct}
                    for one in rewards.decode(row.pop("step_rewards_json"))
                ],
                "ground_truth_json": bytes(
                    knowledge.decode(row.pop("knowledge_json")).game_knowledge
                ).decode(),
            }
            try:
                portion.append(scrubbed(row) if selection.safe else row)
            # A row that cannot be made safe costs only itself.
            except ScrubError as error:
                log.error("%s", error)
        yield portion


def _absent(home: Home, artifact: Artifact, selection: Selection) -> set[tuple[str, str]]:
    """Return scenario and agent of the plays that are not taken."""
    return {
        (row["scenario_id"], row["agent_id"])
        for frame in iter_artifact(home, artifact, _IDS)
        for row in frame.iter_rows(named=True)
        if not selection.takes(row["agent_id"], row["trajectory_id"])
    }


def _shown(call: Call, selection: Selection) -> Call:
    """Return the call without token ids that stand for text which nobody could scrub."""
    return (
        msgspec.structs.replace(call, **dict.fromkeys(_TOKENS))
        if call.unseen and selection.safe
        else call
    )


def _step(step: PublishedStep) -> dict[str, Any]:
    action, error = step.action, step.action.error
    return {
        "step": step.step_number,
        "at": _time(step.timestamp),
        "balance_usd": number(step.environment_state.agent_balance),
        "action_type": action.action_type,
        "parameters_json": _json(action.parameters),
        "success": action.success,
        "result_json": _json(action.result),
        "error": error if isinstance(error, str | None) else _json(error),
        "reward": number(step.reward),
    }


def number(value: object) -> float | None:
    """Return the number as a column holds it; None for anything else, and one too large for it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _time(milliseconds: object) -> datetime | None:
    try:
        since = number(milliseconds)
        return None if since is None else datetime.fromtimestamp(since / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # no calendar has this time
        return None


def _json(value: object) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def scrubbed(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without secrets; a row in which any was found has no token ids.

    Raises:
        ScrubError: an id of the row holds a secret, or the scrubbed text still does.
    """
    ids = {name: row[name] for name in (*_IDS, "players")}
    bare = {name: value for name, value in row.items() if name not in ids}
    bare["calls"] = [{**call, **dict.fromkeys(_TOKENS)} for call in row["calls"]]
    # A digest of 40 or 64 hexadecimal digits is a usual id.
    if named := found(map(str, ids.values())) - {HEX_KEY}:
        # The name itself is the secret, so the message gives the window only.
        raise ScrubError(
            f"a trajectory of window {row['window_id'][:16]} is not published: rule"
            f" {', '.join(sorted(named))} matches one of its ids; rename the agent or trajectory"
        )
    if not (rules := found(dict.fromkeys(texts_of(bare)))):
        return row
    clean = cleaned(bare)
    if left := found(texts_of(clean)):
        raise ScrubError(
            f"trajectory {row['trajectory_id']} is not published: rule {', '.join(sorted(left))}"
            " still matches after scrubbing"
        )
    return {**ids, **clean, "scrubbed": sorted(rules), "token_ids_exact": False}

"""Feedback in words on a window's decisions (``OBJECTIVE=sdpo``), for the teacher's context alone.

It comes from the judge's reasons, from feedback that play was given, and from the outcome, which is
known only in hindsight: the dollars that the decision and the play made, and the best answer of
another agent at the same step of the same scenario. Training rows hold none of it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import polars as pl

from babylon.core.artifacts import iter_artifact
from babylon.core.home import Home
from babylon.core.learning_settings import Objective
from babylon.core.llm_calls import tool_call_texts
from babylon.core.preferences import DecisionWords
from babylon.core.trajectories import Call, Payoff, TrainingRow, Trajectory, read_trajectories
from babylon.core.types import Artifact, Scored
from babylon.quality.decode import GameStep, decode
from babylon.scoring.scorer import FALLBACK
from babylon.store.connection import Store
from babylon.store.feedback import known_feedback
from babylon.store.scores import window_scores

MOST = 600  # characters of one quotation
Said = Mapping[tuple[str, int | None], Sequence[str]]
"""(trajectory id, step) → what was said of it; step None: of the whole trajectory."""


async def words_for(
    store: Store, home: Home, scored: Scored, rows: Sequence[TrainingRow], objective: Objective
) -> list[DecisionWords]:
    """Return the words on the decisions of ``rows``; none for an objective without words."""
    if "sdpo" not in objective.split("+"):
        return []
    window_id, names = scored.claim.window_id, [row.trajectory_id for row in rows]
    said: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for one in await window_scores(store, window_id):
        said[one.trajectory_id, None] += [r for r in one.reasons if not r.startswith(FALLBACK)]
    known = await known_feedback(store, window_id, names)
    about = {one.trajectory_id for one in known if one.call_id is not None}
    steps = await asyncio.to_thread(_steps_of_calls, home, scored.artifact, about)
    for given in known:
        step = given.step
        if step is None and given.call_id is not None:
            step = steps.get((given.trajectory_id, given.call_id))
            if step is None:  # it is about one decision, and nobody knows which
                continue
        if text := given.comment or given.label:
            said[given.trajectory_id, step].append(text)
    played = await asyncio.to_thread(read_trajectories, home, scored.artifact)
    return decision_words(rows, played, said)


def _steps_of_calls(
    home: Home, artifact: Artifact, trajectory_ids: Collection[str]
) -> dict[tuple[str, str], int]:
    """Return (trajectory id, call id) → number of the recorded step that names the call."""
    if not trajectory_ids:
        return {}
    columns = ["trajectory_id", "game_json"]
    return {
        (name, str(call.call_id)): step.step_number
        for frame in iter_artifact(home, artifact, columns)
        for name, text in frame.filter(pl.col("trajectory_id").is_in(trajectory_ids)).iter_rows()
        for step in decode(text, tuple[GameStep, ...], "stepsJson")
        for call in step.llm_calls
    }


def decision_words(
    rows: Sequence[TrainingRow], played: Sequence[Trajectory], said: Said
) -> list[DecisionWords]:
    """Return one text for each decision that something is known of."""
    plays = {own.trajectory_id: own for own in played}
    paid = {(own.trajectory_id, payoff.step): payoff for own in played for payoff in own.payoffs}
    best: dict[tuple[str, int], tuple[Payoff, Call]] = {}
    for row, _, call in _calls(rows):
        key, payoff = (row.scenario_id, call.step), paid.get((row.trajectory_id, call.step))
        if payoff and not payoff.failed and (key not in best or _more(payoff, best[key][0])):
            best[key] = payoff, call
    found = []
    for row, place, call in _calls(rows):
        name, payoff = row.trajectory_id, paid.get((row.trajectory_id, call.step))
        lines = _outcome(payoff, plays.get(name), best.get((row.scenario_id, call.step)))
        lines += [
            f"- {_cut(text)}" for key in (call.step, None) for text in said.get((name, key), ())
        ]
        if lines:
            head = ["You answered this before:", _answer(call), "In hindsight:"]
            text = "\n".join([*head, *lines, "Answer again, with what is known now."])
            found.append(DecisionWords(trajectory_id=name, call=place, text=text))
    return found


def _outcome(
    payoff: Payoff | None, play: Trajectory | None, best: tuple[Payoff, Call] | None
) -> list[str]:
    if payoff is None:
        return []
    lines = [f"- That made ${payoff.pnl_usd:+.2f}."]
    if payoff.failed:
        lines = ["- The answer was malformed, or its action was refused."]
    if best and (payoff.failed or _more(best[0], payoff)):
        lines.append(f"- This would have made ${best[0].pnl_usd:+.2f}: {_answer(best[1])}")
    if play is not None:
        lines.append(f"- The whole play made ${play.pnl_usd:+.2f}.")
    return lines


def _calls(rows: Sequence[TrainingRow]) -> Iterator[tuple[TrainingRow, int, Call]]:
    return ((row, place, call) for row in rows for place, call in enumerate(row.calls))


def _more(one: Payoff, other: Payoff) -> bool:
    return one.pnl_usd > other.pnl_usd


def _answer(call: Call) -> str:
    return _cut(call.response or " ".join(tool_call_texts(call.tool_calls)))


def _cut(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST]}…"

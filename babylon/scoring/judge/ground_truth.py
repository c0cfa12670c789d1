"""Ground truth as text: what happened to prices and questions, and what the game knew.

All of it is escaped. Where it is longer than its share of the prompt, lines about markets that the
group's agents dealt with come first, and the last line says how many are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from babylon.scoring.judge.judgment import GroundTruth, JudgedTrajectory
from babylon.scoring.judge.prompt import count_tokens, escape, shorten

_LONGEST = 300  # characters of a line


def truth_lines(truth: GroundTruth) -> list[str]:
    """One line a market outcome."""
    return [escape(shorten(_outcome(row), _LONGEST)) for row in truth.outcomes]


def knowledge_lines(judged: JudgedTrajectory) -> list[str]:
    """One line a fact of the trajectory's ``gameKnowledge``."""
    lines = []
    for topic, facts in judged.knowledge.items():
        if isinstance(facts, Mapping):
            lines += [f"{topic} {name}: {_plain(fact)}" for name, fact in facts.items()]
        elif facts not in (None, [], ""):
            lines.append(f"{topic}: {_plain(facts)}")
    return [escape(shorten(line, _LONGEST)) for line in lines]


def fit_lines(lines: Sequence[str], limit: int, wanted: Sequence[str] = ()) -> str:
    """The lines in at most ``limit`` tokens; those that hold a ``wanted`` word are kept first."""
    if count_tokens("\n".join(lines)) <= limit:
        return "\n".join(lines)
    order = sorted(
        range(len(lines)), key=lambda i: (not any(word in lines[i] for word in wanted), i)
    )
    kept: set[int] = set()
    used = count_tokens(_left_out(len(lines)))
    for index in order:
        used += count_tokens(lines[index] + "\n")
        if used > limit:
            break
        kept.add(index)
    shown = [line for index, line in enumerate(lines) if index in kept]
    return "\n".join([*shown, _left_out(len(lines) - len(shown))])


def _left_out(count: int) -> str:
    return f"[{count} lines left out]"


def _outcome(row: Mapping[str, Any]) -> str:
    parts = []
    if row.get("stockTicker"):
        change = row.get("changePercent")
        moved = "" if change is None else f" ({change:+g} %)"
        parts.append(
            f"{row['stockTicker']}: {row.get('startPrice')} to {row.get('endPrice')}{moved}"
        )
        parts += [str(row["sentiment"])] if row.get("sentiment") else []
    if row.get("predictionMarketId") or row.get("question"):
        parts.append(f"{row.get('predictionMarketId') or ''} {row.get('question') or ''}".strip())
        parts.append(f"resolved {row['outcome']}" if row.get("outcome") else "still open")
        if row.get("finalProbability") is not None:
            parts.append(f"last P(YES) {row['finalProbability']}")
    if row.get("newsEvents"):
        parts.append(f"news: {_plain(row['newsEvents'])}")
    return ", ".join(parts)


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_plain(item) for item in value)
    return str(value)

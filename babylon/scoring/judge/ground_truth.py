"""Ground truth as text: the outcomes of prices and questions, and the game's knowledge.

All text is escaped. If the lines exceed their share of the prompt, lines about markets that the
group's agents traded come first, and the last line counts the lines left out.
"""

from collections.abc import Mapping, Sequence

from babylon.scoring.judge.judgment import GroundTruth, JudgedTrajectory
from babylon.scoring.judge.prompt import count_tokens, escape, shorten

_MAX_LINE = 300  # characters


def truth_lines(truth: GroundTruth) -> list[str]:
    """Return one line for each market outcome."""
    return [escape(shorten(_outcome(row), _MAX_LINE)) for row in truth.outcomes]


def knowledge_lines(judged: JudgedTrajectory) -> list[str]:
    """Return one line for each fact of the trajectory's ``gameKnowledge``."""
    lines = []
    for topic, facts in judged.knowledge.items():
        if isinstance(facts, Mapping):
            lines += [f"{topic} {name}: {_plain(fact)}" for name, fact in facts.items()]
        elif facts not in (None, [], ""):
            lines.append(f"{topic}: {_plain(facts)}")
    return [escape(shorten(line, _MAX_LINE)) for line in lines]


def fit_lines(lines: Sequence[str], limit: int, wanted: Sequence[str] = ()) -> str:
    """Return the lines in at most ``limit`` tokens. Lines with a ``wanted`` word are kept first."""
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


def _outcome(row: Mapping[str, object]) -> str:
    parts = []
    if row.get("stockTicker"):
        change = row.get("changePercent")
        moved = f" ({change:+g} %)" if isinstance(change, int | float) else ""
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

"""Condensing: a trajectory as text for the judge, shortened by fixed rules to fit a limit.

Each step is one line, ``[3] seen | "words" | action -> result``: the lines of prompt, providers and
tool results that were new to the agent, the agent's tool calls and words (for a reply that is a
JSON order, its reasoning), the action with its parameters, and the result. Numbers have two
decimals; small numbers have three significant digits. Lines that all trajectories of a group saw
first at the same step are written once for the group (``common_lines``).

If the text exceeds the limit, it is shortened in this order, all steps alike:

1. Texts are cut to 300 characters, then to 80. Both ends stay, and the cut names the number of
   missing characters.
2. The least important steps are left out: first holds and failures, then other actions with small
   results. The first and the last step stay. Each gap names the number and kind of its steps. Every
   kept step has its prices and its result.
3. Only the summary is left.

The same trajectory and limit give the same text.

Ground truth also becomes text here: the outcomes of prices and questions, and the game's knowledge.
If its lines exceed their share of the prompt, lines about markets that the group's agents traded
come first, and the last line counts the lines left out.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from babylon.core.llm_calls import content_text, tool_call_texts
from babylon.core.trajectories import Call
from babylon.scoring.judge.judgment import GroundTruth, JudgedTrajectory, RecordedStep
from babylon.scoring.judge.prompt import count_tokens, escape, shorten

_LIMITS = (1_000_000, 300, 80)  # characters of one text; first whole
_GAP_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """The parts of one step's line. Steps with a smaller ``weight`` are kept first."""

    number: int
    saw: tuple[str, ...]
    said: str
    did: str
    result: str
    action: str
    weight: tuple[float, ...]

    def line(self, limit: int) -> str:
        """Return the line with each text cut to about ``limit`` characters.

        ``|`` inside a part is replaced, so that an agent's words cannot look like a result.
        """
        saw = shorten(" / ".join(self.saw), 2 * limit)
        said = shorten(self.said, limit).replace('"', "'")
        parts = [saw] if saw else []
        parts += [f'"{said}"'] if said else []
        parts += [shorten(self.did, limit)]
        parts += [f"-> {shorten(self.result, limit)}"] if self.result else []
        line = " | ".join(part.replace("|", "¦") for part in parts)
        return escape(f"[{self.number}] {line}")


Line = tuple[int, str]
"""The step at which an agent first saw a line, and the line."""


def shown_lines(judged: JudgedTrajectory) -> list[Line]:
    """Return every line that the agent was shown, once each, in order."""
    lines: dict[str, int] = {}
    calls = _calls_by_step(judged)
    for index, step in enumerate(judged.steps):
        number = _number(step, index)
        for line in _lines_of_step(step, calls.get(number, ())):
            lines.setdefault(line, number)
    return [(number, line) for line, number in lines.items()]


def common_lines(group: Sequence[JudgedTrajectory]) -> list[Line]:
    """Return the lines that every trajectory of a group was first shown at the same step."""
    if len(group) < 2:
        return []
    others = [set(shown_lines(judged)) for judged in group[1:]]
    return [line for line in shown_lines(group[0]) if all(line in seen for seen in others)]


def render_common(lines: Sequence[Line]) -> list[str]:
    """Return one line of text for each step."""
    steps = groupby(lines, key=lambda line: line[0])
    return [escape(f"[{number}] {' / '.join(line for _, line in own)}") for number, own in steps]


def condense(judged: JudgedTrajectory, common: Iterable[Line], limit: int) -> str:
    """Return the trajectory in at most ``limit`` tokens (``count_tokens``), with its summary."""
    summary = summarise(judged)
    steps = _step_texts(judged, frozenset(common))
    for characters in _LIMITS:
        text = "\n".join([*(step.line(characters) for step in steps), summary])
        if count_tokens(text) <= limit:
            return text
    kept = _keep_most_important(steps, limit - count_tokens(summary))
    return "\n".join([*kept, summary])


def summarise(judged: JudgedTrajectory) -> str:
    """Return the last line of a trajectory: its counts, balance and P&L."""
    own = judged.trajectory
    state = judged.steps[-1].get("environmentState", {}) if judged.steps else {}
    balance = state.get("agentBalance")
    held = f", last balance ${balance:.2f}" if isinstance(balance, int | float) else ""
    return escape(
        f"Summary: {own.steps} steps, {own.actions} actions, {own.wins} of {own.trades} decided"
        f" trades won{held}, P&L in this window ${own.pnl_usd:+.2f}"
    )


def _keep_most_important(steps: Sequence[StepText], limit: int) -> list[str]:
    last = len(steps) - 1
    order = sorted(range(len(steps)), key=lambda i: (i not in (0, last), steps[i].weight, -i))
    kept: set[int] = set()
    used = 0
    for index in order:
        cost = count_tokens(steps[index].line(_LIMITS[-1])) + _GAP_TOKENS
        if used + cost <= limit:
            kept.add(index)
            used += cost
    lines: list[str] = []
    gap: list[StepText] = []
    for index, step in enumerate(steps):
        if index not in kept:
            gap.append(step)
            continue
        lines += _gap(gap)
        gap = []
        lines.append(step.line(_LIMITS[-1]))
    return lines + _gap(gap)


def _gap(steps: Sequence[StepText]) -> list[str]:
    if not steps:
        return []
    counts = Counter(step.action for step in steps).most_common(4)
    what = ", ".join(f"{count} {escape(shorten(action, 24))}" for action, count in counts)
    return [f"[{len(steps)} steps left out: {what}]"]


def _step_texts(judged: JudgedTrajectory, common: frozenset[Line]) -> list[StepText]:
    seen = {line for _, line in common}
    calls = _calls_by_step(judged)
    texts = []
    for index, step in enumerate(judged.steps):
        own = calls.get(_number(step, index), ())
        new = [line for line in _lines_of_step(step, own) if line not in seen]
        seen.update(new)
        texts.append(_step_text(step, index, tuple(dict.fromkeys(new)), own))
    return texts


def _calls_by_step(judged: JudgedTrajectory) -> dict[int, list[Call]]:
    calls: dict[int, list[Call]] = {}
    for call in judged.trajectory.calls:
        calls.setdefault(call.step, []).append(call)
    return calls


def _step_text(
    step: RecordedStep, index: int, saw: tuple[str, ...], calls: Iterable[Call]
) -> StepText:
    action = step.get("action", {})
    name = str(action.get("actionType", "?"))
    parameters = _compact(action.get("parameters"))
    asked = [text for call in calls for text in tool_call_texts(call.tool_calls)]
    said = " / ".join([*(f"called {text}" for text in asked), *_words_of_step(step, action)])
    failed = "" if action.get("success") else f"failed: {action.get('error') or 'no reason given'}"
    result = " ".join(filter(None, [failed, _compact(action.get("result")), _verdict(action)]))
    outcome = action.get("result")
    pnl = outcome.get("pnl") if isinstance(outcome, dict) else None
    gain = float(pnl) if isinstance(pnl, int | float) else 0.0
    return StepText(
        number=_number(step, index),
        saw=saw,
        said="" if said in (name, parameters) else said,
        did=f"{name} {parameters}".strip(),
        result=result,
        action=name,
        weight=(float(name == "HOLD" or bool(failed)), -abs(gain)),
    )


def _number(step: RecordedStep, index: int) -> int:
    number = step.get("stepNumber")
    return number if isinstance(number, int) else index


def _words_of_step(step: RecordedStep, action: RecordedStep) -> list[str]:
    words: dict[str, None] = {}
    for call in step.get("llmCalls", ()):
        if call.get("purpose") != "evaluation":
            words.update(dict.fromkeys(_words(call.get("response"))))
            words.update(dict.fromkeys(_texts(call.get("reasoning"))))
    words.update(dict.fromkeys(_texts(action.get("reasoning"))))
    return list(words)


def _words(response: object) -> list[str]:
    """Return a reply's text. A JSON order gives only its reasoning; ``did`` holds the order."""
    texts = _texts(response)
    if not texts or not texts[0].lstrip().startswith("{"):
        return texts
    try:
        order = json.loads(texts[0])
    except (ValueError, RecursionError):  # no JSON, or nested so deep that only the text is shown
        return texts
    parts = [order, order.get("trade")]
    return _texts(*[part.get("reasoning") for part in parts if isinstance(part, dict)])


def _lines_of_step(step: RecordedStep, calls: Iterable[Call]) -> list[str]:
    lines: list[str] = []
    for call in calls:
        results = [content_text(one) for one in call.messages if one.get("role") == "tool"]
        lines += [f"tool result: {text.strip()}" for text in results if text.strip()]
    for call in step.get("llmCalls", ()):
        if call.get("purpose") != "evaluation":
            for text in _texts(call.get("systemPrompt"), call.get("userPrompt")):
                lines += [line.strip() for line in text.splitlines() if line.strip()]
    accesses = step.get("providerAccesses")  # not checked before, unlike the calls
    for access in accesses if isinstance(accesses, list) else ():
        data = _compact(access.get("data")) if isinstance(access, dict) else ""
        if data:
            lines.append(f"{access.get('providerName', '')}: {data}")
    return lines


def _texts(*values: object) -> list[str]:
    return [value for value in values if isinstance(value, str) and value.strip()]


def _verdict(action: RecordedStep) -> str:
    correctness = action.get("correctness") or {}
    for key in ("predictionCorrect", "perpCorrect"):
        if isinstance(correctness.get(key), bool):
            return "(right)" if correctness[key] else "(wrong)"
    return ""


def _compact(value: object) -> str:
    """Return ``key=value`` pairs of an object, other values as compact JSON, "" for empty ones."""
    if value in (None, {}, [], ""):
        return ""
    if isinstance(value, dict):
        pairs = [f"{key}={_compact(item) or '-'}" for key, item in value.items()]
        return " ".join(pairs)
    if isinstance(value, str):
        return value
    return json.dumps(_rounded(value), ensure_ascii=False, separators=(",", ":"))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 2) if abs(value) >= 1 else float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


_MAX_LINE = 300  # characters


def truth_lines(truth: GroundTruth) -> list[str]:
    """Return one line for each market outcome that can be written."""
    lines = []
    for row in truth.outcomes:
        try:
            lines.append(escape(shorten(_outcome(row), _MAX_LINE)))
        except RecursionError:  # one outcome, nested too deep, costs only itself
            lines.append("[an outcome that cannot be read]")
    return lines


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

"""A trajectory as text for the judge: everything that fits, then by rule what matters most.

One line a step, ``[3] seen | "words" | action -> result``: what was new to the agent (lines of its
prompt and of its providers that it had not seen before), its words (of a reply that is a JSON
order, the reasoning in it), the action with its parameters, and the result. Numbers have two
decimals, small ones three figures. Lines that all trajectories of a group saw first at the same
step are told once, beside the group (``common_lines``).

Where the text is longer than the limit, details go in this order, each time for all steps alike:

1. texts are cut to 300 characters, then to 80; both ends stay, and how much is missing is said;
2. of the steps, those that matter least go: first holds and failures from the middle, then other
   actions by the size of their result. The first and the last step stay, and each gap says how
   many steps of which actions are left out. Prices seen and results stand in every kept step;
3. in the end, the summary alone.

The same trajectory and limit give the same text.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from babylon.scoring.judge.judgment import JudgedTrajectory
from babylon.scoring.judge.prompt import count_tokens, escape, shorten

_WHOLE = 1_000_000
_LIMITS = (_WHOLE, 300, 80)  # characters of one text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """The parts of one step's line; ``weight`` says how much is lost without it."""

    number: int
    saw: tuple[str, ...]
    said: str
    did: str
    result: str
    action: str
    weight: tuple[float, ...]

    def line(self, limit: int) -> str:
        """``|`` parts the parts, so none in them stays one: an agent's words cannot pose as a
        result."""
        saw = shorten(" / ".join(self.saw), 2 * limit)
        said = shorten(self.said, limit).replace('"', "'")
        parts = [saw] if saw else []
        parts += [f'"{said}"'] if said else []
        parts += [shorten(self.did, limit)]
        parts += [f"-> {shorten(self.result, limit)}"] if self.result else []
        told = " | ".join(part.replace("|", "¦") for part in parts)
        return escape(f"[{self.number}] {told}")


Line = tuple[int, str]
"""A line that an agent was shown, and the number of the step in which it first was."""


def shown_lines(judged: JudgedTrajectory) -> list[Line]:
    """Every line that the agent was shown, in order, once each."""
    lines: dict[str, int] = {}
    for index, step in enumerate(judged.steps):
        for line in _shown(step):
            lines.setdefault(line, _number(step, index))
    return [(number, line) for line, number in lines.items()]


def common_lines(group: Sequence[JudgedTrajectory]) -> list[Line]:
    """Lines that every trajectory of a group was shown first at the same step, in order."""
    if len(group) < 2:
        return []
    others = [set(shown_lines(judged)) for judged in group[1:]]
    return [line for line in shown_lines(group[0]) if all(line in seen for seen in others)]


def render_common(lines: Sequence[Line]) -> list[str]:
    """One line of text a step."""
    steps = groupby(lines, key=lambda line: line[0])
    return [escape(f"[{number}] {' / '.join(line for _, line in own)}") for number, own in steps]


def condense(judged: JudgedTrajectory, common: Iterable[Line], limit: int) -> str:
    """The trajectory in at most ``limit`` tokens (our count); the summary always stands."""
    summary = summarise(judged)
    steps = _step_texts(judged, frozenset(common))
    for characters in _LIMITS:
        text = _join([step.line(characters) for step in steps], summary)
        if count_tokens(text) <= limit:
            return text
    return _join(_fewer(steps, limit - count_tokens(summary)), summary)


def summarise(judged: JudgedTrajectory) -> str:
    """The last line of a trajectory: what came of it."""
    own = judged.trajectory
    state = judged.steps[-1].get("environmentState", {}) if judged.steps else {}
    balance = state.get("agentBalance")
    held = f", last balance ${balance:.2f}" if isinstance(balance, int | float) else ""
    return escape(
        f"Summary: {own.steps} steps, {own.actions} actions, {own.wins} of {own.trades} decided"
        f" trades won{held}, P&L in this window ${own.pnl_usd:+.2f}"
    )


def _join(lines: Sequence[str], summary: str) -> str:
    return "\n".join([*lines, summary])


def _fewer(steps: Sequence[StepText], limit: int) -> list[str]:
    """The steps that matter most, as many as fit, with each gap counted."""
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


_GAP_TOKENS = 40


def _gap(steps: Sequence[StepText]) -> list[str]:
    if not steps:
        return []
    counts = Counter(step.action for step in steps).most_common(4)
    what = ", ".join(f"{count} {escape(shorten(action, 24))}" for action, count in counts)
    return [f"[{len(steps)} steps left out: {what}]"]


def _step_texts(judged: JudgedTrajectory, common: frozenset[Line]) -> list[StepText]:
    seen = {line for _, line in common}
    texts = []
    for index, step in enumerate(judged.steps):
        new = [line for line in _shown(step) if line not in seen]
        seen.update(new)
        texts.append(_step_text(step, index, tuple(dict.fromkeys(new))))
    return texts


def _step_text(step: Mapping[str, Any], index: int, saw: tuple[str, ...]) -> StepText:
    action = step.get("action", {})
    name = str(action.get("actionType", "?"))
    parameters = _compact(action.get("parameters"))
    said = " / ".join(_said(step, action))
    failed = "" if action.get("success") else f"failed: {action.get('error') or 'no reason given'}"
    result = " ".join(filter(None, [failed, _compact(action.get("result")), _right(action)]))
    gain = _gain(action.get("result"))
    return StepText(
        number=_number(step, index),
        saw=saw,
        said="" if said in (name, parameters) else said,
        did=f"{name} {parameters}".strip(),
        result=result,
        action=name,
        weight=(float(name == "HOLD" or bool(failed)), -abs(gain)),
    )


def _number(step: Mapping[str, Any], index: int) -> int:
    number = step.get("stepNumber")
    return number if isinstance(number, int) else index


def _said(step: Mapping[str, Any], action: Mapping[str, Any]) -> list[str]:
    """The agent's words of a step: its replies, and reasons where they are not among them."""
    words: dict[str, None] = {}
    for call in step.get("llmCalls", ()):
        if call.get("purpose") != "evaluation":
            words.update(dict.fromkeys(_words(call.get("response"))))
            words.update(dict.fromkeys(_texts(call.get("reasoning"))))
    words.update(dict.fromkeys(_texts(action.get("reasoning"))))
    return list(words)


def _words(response: object) -> list[str]:
    """A reply; of one that is a JSON order only its reasoning, because ``did`` tells the order."""
    texts = _texts(response)
    if not texts or not texts[0].lstrip().startswith("{"):
        return texts
    try:
        order = json.loads(texts[0])
    except ValueError:
        return texts
    parts = [order, order.get("trade")]
    return _texts(*[part.get("reasoning") for part in parts if isinstance(part, dict)])


def _shown(step: Mapping[str, Any]) -> list[str]:
    """What the agent read before it acted, line by line."""
    lines: list[str] = []
    for call in step.get("llmCalls", ()):
        if call.get("purpose") != "evaluation":
            for text in _texts(call.get("systemPrompt"), call.get("userPrompt")):
                lines += [line.strip() for line in text.splitlines() if line.strip()]
    for access in step.get("providerAccesses", ()):
        data = _compact(access.get("data"))
        if data:
            lines.append(f"{access.get('providerName', '')}: {data}")
    return lines


def _texts(*values: object) -> list[str]:
    return [value for value in values if isinstance(value, str) and value.strip()]


def _right(action: Mapping[str, Any]) -> str:
    """The game's own verdict on a decided trade."""
    correctness = action.get("correctness") or {}
    for key in ("predictionCorrect", "perpCorrect"):
        if isinstance(correctness.get(key), bool):
            return "(right)" if correctness[key] else "(wrong)"
    return ""


def _gain(result: object) -> float:
    pnl = result.get("pnl") if isinstance(result, dict) else None
    return float(pnl) if isinstance(pnl, int | float) else 0.0


def _compact(value: object) -> str:
    """``key=value`` of an object, else JSON without spaces; nothing for nothing."""
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

"""Condensing: a trajectory as text for the judge, shortened by fixed rules to fit a budget.

Each step is one line, ``[3] seen | "words" | action -> result``: the lines of messages and
providers that were new to the agent, the agent's words (for a reply that is a JSON order, its
reasoning), the action with its parameters and tool calls, and the result. The action of a step that
has no other is its reply. Numbers have two decimals; small numbers have three significant digits.
Words without information are left out: those that only name the action, words said before, and
results that only confirm the success. Steps in a row whose lines are equal are one line, ``[3-7]``.

**Shared lines.** Lines that all trajectories of a group saw first at the same step are written once
for the group (``common_lines``). Of other lines that several trajectories saw, each text holds a
reference; a prompt states such a line once for all of its trajectories (``SharedLines``).

**Budget.** The text gets less detailed, level by level (``_LEVELS``), until it takes at most the
wanted tokens: texts are cut, then the texts of quiet steps (holds and failures) are left out, then
those of all steps. Decisions and results stay at every level. What answered the agent in a
conversation is a result: tool results and later messages of the user. Only if the text exceeds the
room in the judge's context, decisions and results are cut further (``_SMALLEST``), and then steps
are left out, the least important first: holds and failures, then other actions with small results.
The first and the last step stay. Each cut is marked: ``…`` for lines, a number for characters and
steps.

The same trajectory, lines and limits give the same text.

Ground truth also becomes text here: the outcomes of prices and questions, and the game's knowledge.
If its lines exceed their share of the prompt, lines about markets that the group's agents traded
come first, and the last line counts the lines left out.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from babylon.core.llm_calls import Message, content_text, tool_call_texts
from babylon.core.trajectories import Call
from babylon.formats.trace import RESPONSE
from babylon.scoring.judge.judgment import GroundTruth, JudgedTrajectory, RecordedStep
from babylon.scoring.judge.prompt import count_tokens, escape, shorten

_GAP_TOKENS = 40
_ALL = 1_000_000


@dataclass(frozen=True, slots=True)
class _Level:
    """Characters of a step's texts: seen and said, of quiet steps, and of decision and result."""

    seen: int
    said: int
    quiet_seen: int
    quiet_said: int
    done: int


_LEVELS = (
    _Level(_ALL, _ALL, _ALL, _ALL, _ALL),
    _Level(600, 300, 600, 300, 1000),
    _Level(300, 150, 150, 80, 1000),
    _Level(160, 80, 80, 0, 1000),
    _Level(80, 80, 0, 0, 1000),
    _Level(0, 80, 0, 0, 1000),
    _Level(0, 0, 0, 0, 1000),
)
_SMALLEST = (_Level(0, 0, 0, 0, 300), _Level(0, 0, 0, 0, 80))  # only for want of room
REPLY = "REPLY"  # the action of a play that ends with a reply to compare, shown whole if it fits
_LEAST_SHARED = 24  # characters; a reference to a shorter line would save nothing
_VERDICT = re.compile(r"\((right|wrong)\)", re.IGNORECASE)
_REFERENCE = re.compile("\x01([0-9]+)\x02")  # ``escape`` removes both characters from all texts


@dataclass(frozen=True, slots=True)
class SharedLines:
    """Lines that several trajectories of a group saw, with the number of those trajectories."""

    lines: tuple[str, ...] = ()
    seen_by: tuple[int, ...] = ()
    _numbers: dict[str, int] = field(default_factory=dict, repr=False)

    def reference(self, line: str) -> str | None:
        """Return the mark that stands for a line in texts, ``None`` if it is not shared."""
        number = self._numbers.get(line)
        return None if number is None else f"\x01{number}\x02"

    def cost(self, part: str) -> int:
        """Return the characters of a line or reference; of a shared line, one agent's part."""
        found = _REFERENCE.fullmatch(part)
        if found is None:
            return len(part)
        number = int(found[1])
        return -(-len(self.lines[number]) // self.seen_by[number])

    def whole(self, text: str) -> str:
        """Return the text with each line in place of its reference."""
        return _REFERENCE.sub(lambda found: self.lines[int(found[1])], text)

    def stated(self, texts: Sequence[str]) -> tuple[str, list[str]]:
        """Return the lines that several of the texts refer to, and the texts.

        Those lines are numbered, ``L3: ...``, and the texts hold ``L3``. Other lines stay in place.
        """
        used = Counter(int(number) for text in texts for number in set(_REFERENCE.findall(text)))
        several = {number for number, count in used.items() if count > 1}

        def put(found: re.Match[str]) -> str:
            number = int(found[1])
            return f"L{number}" if number in several else self.lines[number]

        table = "\n".join(f"L{number}: {self.lines[number]}" for number in sorted(several))
        return table, [_REFERENCE.sub(put, text) for text in texts]


NOTHING_SHARED = SharedLines()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """The parts of one step's line. Steps with a smaller ``weight`` are kept first.

    ``heard``: what answered the agent's earlier words and tool calls. ``result`` ends with the
    game's ``verdict`` on the trade, if it has one.
    """

    number: int
    saw: tuple[str, ...]
    heard: tuple[str, ...]
    said: tuple[str, ...]
    did: str
    result: str
    verdict: str
    action: str
    weight: tuple[float, ...]

    @property
    def quiet(self) -> bool:
        """True for holds and failures."""
        return bool(self.weight[0])

    def body(self, level: _Level, shared: SharedLines) -> str:
        """Return the line without its number.

        Its own marks are replaced inside a part (``_inert``), so that no text that an agent wrote
        looks like a result or a verdict.
        """
        seen, words = (
            (level.quiet_seen, level.quiet_said) if self.quiet else (level.seen, level.said)
        )
        said = _cut(" / ".join(self.said), words).replace('"', "'")
        parts = [_inert(f'"{said}"')] if said else []
        whole = self.action == REPLY and level not in _SMALLEST
        parts += [_inert(_cut(self.did, _ALL if whole else level.done))]
        if self.result:
            told = "->" + _inert(f"-> {_cut(self.result, level.done)}")[2:]
            parts += [told[: len(told) - len(self.verdict)] + self.verdict]
        shown = [*_fitting(self.saw, seen, shared), *_fitting(self.heard, level.done, shared)]
        return " | ".join([*([" / ".join(shown)] if shown else []), *parts])


def _fitting(lines: Sequence[str], limit: int, shared: SharedLines) -> list[str]:
    """Return the first lines, as many as ``limit`` characters hold; 0: none."""
    kept: list[str] = []
    for line in lines if limit else ():
        part = shared.reference(line) or _inert(_cut(line, limit))
        limit -= shared.cost(part)
        if limit < 0 and kept:
            kept.append("…")
            break
        kept.append(part)
    return kept


def _inert(text: str) -> str:
    """Escape a text, and replace the marks of parts, results and verdicts."""
    return _VERDICT.sub(r"[\1]", escape(text).replace("|", "¦").replace("->", "-›"))


def _cut(text: str, limit: int) -> str:
    """Cut a text to about ``limit`` characters, if that is shorter than naming the cut."""
    return shorten(text, limit) if limit and len(text) > limit + 30 else text if limit else ""


Line = tuple[int, str]
"""The step at which an agent first saw a line, and the line."""


def shown_lines(judged: JudgedTrajectory) -> list[Line]:
    """Return every line that the agent was shown, once each, in order."""
    lines: dict[str, int] = {}
    calls = _calls_by_step(judged)
    for index, step in enumerate(judged.steps):
        number = step_number(step, index)
        for line, _ in _lines_of_step(step, calls.get(number, ())):
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


def plain_tokens(judged: JudgedTrajectory) -> int:
    """Count the tokens of the plain transcript: each message and reply once, as they are."""
    seen = "\n".join(line for _, line in shown_lines(judged))
    words = [word for step in judged.steps for word in _words_of_step(step, step.get("action", {}))]
    return count_tokens(seen) + sum(map(count_tokens, words))


def shared_lines(group: Sequence[JudgedTrajectory], common: Iterable[Line] = ()) -> SharedLines:
    """Return the lines that at least two trajectories of a group saw, apart from common ones."""
    apart = {line for _, line in common}
    counts = Counter(line for judged in group for _, line in shown_lines(judged))
    found = [
        line
        for line, count in counts.items()
        if count > 1 and len(line) >= _LEAST_SHARED and line not in apart
    ]
    return SharedLines(
        lines=tuple(map(_inert, found)),
        seen_by=tuple(counts[line] for line in found),
        _numbers={line: number for number, line in enumerate(found)},
    )


def condense(
    judged: JudgedTrajectory,
    common: Iterable[Line],
    room: int,
    *,
    wanted: int | None = None,
    shared: SharedLines = NOTHING_SHARED,
) -> str:
    """Return the trajectory with its summary, as text with references to ``shared`` lines.

    It takes at most ``room`` tokens (``count_tokens``), also with all lines in place of their
    references. It takes about ``wanted`` tokens, unless decisions and results alone take more;
    shared lines count by this trajectory's part.
    """
    summary = summarise(judged)
    steps = _step_texts(judged, frozenset(common))
    for level in (*_LEVELS, *_SMALLEST):
        text = "\n".join([*_lines(steps, level, shared), summary])
        enough = level in (_LEVELS[-1], *_SMALLEST)
        if (wanted is None or enough or _tokens(text, shared) <= wanted) and count_tokens(
            shared.whole(text)
        ) <= room:
            return text
    kept = _keep_most_important(steps, room - count_tokens(summary))
    return "\n".join([*kept, summary])


def _tokens(text: str, shared: SharedLines) -> int:
    """Count tokens, of shared lines this trajectory's part."""
    parts = sum(shared.cost(found[0]) for found in _REFERENCE.finditer(text))
    return count_tokens(_REFERENCE.sub("L0", text)) + parts // 4


def _lines(steps: Sequence[StepText], level: _Level, shared: SharedLines) -> list[str]:
    """Return the steps' lines, one for steps in a row that are equal."""
    told, lines = _without_repeats(steps, level), []
    bodies = [(step.number, step.body(level, shared)) for step in told]
    for body, run in groupby(bodies, key=lambda one: one[1]):
        numbers = [number for number, _ in run]
        several = numbers[-1] - numbers[0] == len(numbers) - 1 > 0
        names = [f"{numbers[0]}-{numbers[-1]}"] if several else numbers
        lines += [f"[{name}] {body}" for name in names]
    silent = sum(_is_silenced(step, level) for step in told)
    return [*lines, f"[seen or said at {silent} steps: left out]"] if silent else lines


def _without_repeats(steps: Sequence[StepText], level: _Level) -> list[StepText]:
    """Return the steps without words that an earlier step shows at this level."""
    shown: set[str] = set()
    told = []
    for step in steps:
        told.append(replace(step, said=tuple(one for one in step.said if one not in shown)))
        if level.quiet_said if step.quiet else level.said:
            shown.update(step.said)
    return told


def _is_silenced(step: StepText, level: _Level) -> bool:
    seen, said = (level.quiet_seen, level.quiet_said) if step.quiet else (level.seen, level.said)
    return bool((step.saw and not seen) or (step.said and not said))


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
        cost = count_tokens(_last_line(steps[index])) + _GAP_TOKENS
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
        lines.append(_last_line(step))
    return lines + _gap(gap)


def _last_line(step: StepText) -> str:
    return f"[{step.number}] {step.body(_SMALLEST[-1], NOTHING_SHARED)}"


def _gap(steps: Sequence[StepText]) -> list[str]:
    if not steps:
        return []
    counts = Counter(step.action for step in steps).most_common(4)
    what = ", ".join(f"{count} {_inert(shorten(action, 24))}" for action, count in counts)
    return [f"[{len(steps)} steps left out: {what}]"]


def _step_texts(judged: JudgedTrajectory, common: frozenset[Line]) -> list[StepText]:
    seen = {line for _, line in common}
    calls = _calls_by_step(judged)
    texts = []
    for index, step in enumerate(judged.steps):
        own = calls.get(step_number(step, index), ())
        lines = dict(reversed(_lines_of_step(step, own)))  # the first of equal lines counts
        new = {line: answers for line, answers in reversed(lines.items()) if line not in seen}
        seen.update(new)
        texts.append(_step_text(step, index, new, own))
    return texts


def _calls_by_step(judged: JudgedTrajectory) -> dict[int, list[Call]]:
    calls: dict[int, list[Call]] = {}
    for call in judged.trajectory.calls:
        calls.setdefault(call.step, []).append(call)
    return calls


def _step_text(
    step: RecordedStep, index: int, new: Mapping[str, bool], calls: Iterable[Call]
) -> StepText:
    action = step.get("action", {})
    name = str(action.get("actionType", "?"))
    parameters = _compact(action.get("parameters"))
    asked = [f"called {text}" for call in calls for text in tool_call_texts(call.tool_calls)]
    known = {name.casefold(), parameters.casefold()}
    words = [word for word in _words_of_step(step, action) if word.strip().casefold() not in known]
    did, said = [name, parameters, *asked], words
    if _is_reply(action):
        did, said = [*did, *words], []
    outcome, verdict = action.get("result"), _verdict(action)
    pnl = outcome.get("pnl") if isinstance(outcome, dict) else None
    gain = float(pnl) if isinstance(pnl, int | float) else 0.0
    return StepText(
        number=step_number(step, index),
        saw=tuple(line for line, answers in new.items() if not answers),
        heard=tuple(line for line, answers in new.items() if answers),
        said=tuple(said),
        did=" ".join(filter(None, did)),
        result=" ".join(filter(None, [_result(action), verdict])),
        verdict=verdict,
        action=name,
        weight=(float(name == "HOLD" or not action.get("success")), -abs(gain)),
    )


def _result(action: RecordedStep) -> str:
    failed = "" if action.get("success") else f"failed: {action.get('error') or 'no reason given'}"
    told = action.get("result")
    if isinstance(told, dict):  # ``executed=true`` only confirms the success
        told = {key: value for key, value in told.items() if value is not True}
    return f"{failed} {_compact(told)}".strip()


def step_number(step: RecordedStep, index: int) -> int:
    """Return the game's number of a step. Numbers may begin at 1, and have gaps."""
    number = step.get("stepNumber")
    return number if isinstance(number, int) else index


def _is_reply(action: RecordedStep) -> bool:
    """Return True if only the reply shows what the agent did."""
    name = action.get("actionType", RESPONSE)
    known = action.get("parameters") or action.get("result") or name == "HOLD"
    return bool(name == RESPONSE or not known)


def _words_of_step(step: RecordedStep, action: RecordedStep) -> list[str]:
    words: dict[str, None] = {}
    words_of = _texts if _is_reply(action) else _words
    for call in step.get("llmCalls", ()):
        if call.get("purpose") != "evaluation":
            words.update(dict.fromkeys(words_of(call.get("response"))))
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


def _lines_of_step(step: RecordedStep, calls: Iterable[Call]) -> list[tuple[str, bool]]:
    """Return each line, and whether it answers the agent's earlier words and tool calls."""
    sent: list[Sequence[Message]] = [call.messages for call in calls]
    sent += [
        _messages(call) for call in step.get("llmCalls", ()) if call.get("purpose") != "evaluation"
    ]
    lines: list[tuple[str, bool]] = []
    for messages in sent:
        answers = False
        for message in messages:
            text = content_text(message).strip()
            if message.get("role") == "assistant":
                answers = True
            elif message.get("role") == "tool":
                lines += [(f"tool result: {text}", True)] if text else []
            else:
                lines += [(one.strip(), answers) for one in text.splitlines() if one.strip()]
    accesses = step.get("providerAccesses")  # not checked before, unlike the calls
    for access in accesses if isinstance(accesses, list) else ():
        data = _compact(access.get("data")) if isinstance(access, dict) else ""
        if data:
            lines.append((f"{access.get('providerName', '')}: {data}", False))
    return lines


_PROMPTS = (("system", "systemPrompt"), ("user", "userPrompt"))


def _messages(call: RecordedStep) -> Sequence[Message]:
    """Return a call's messages, or its prompts as messages."""
    told = call.get("messages")  # training does not read them: any type passes the checks
    if isinstance(told, list) and told and all(isinstance(one, dict) for one in told):
        return told
    return [{"role": role, "content": call.get(key)} for role, key in _PROMPTS]


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
_MAX_PART = _MAX_LINE // 2  # of an outcome whose line would be longer


def truth_lines(truth: GroundTruth) -> list[str]:
    """Return one line for each market outcome that can be written."""
    lines = []
    for row in truth.outcomes:
        try:
            lines.append(escape(_outcome(row)))
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


def fit_lines(
    lines: Sequence[str], limit: int, wanted: Sequence[str] = (), between: str = "\n"
) -> str:
    """Return the lines in at most ``limit`` tokens. Lines with a ``wanted`` name are kept first."""
    if count_tokens(whole := between.join(lines)) <= limit:
        return whole
    order = sorted(
        range(len(lines)), key=lambda i: (not any(_names(lines[i], name) for name in wanted), i)
    )
    kept: set[int] = set()
    used = count_tokens(_left_out(len(lines)))
    for index in order:
        used += count_tokens(lines[index] + between)
        if used > limit:
            break
        kept.add(index)
    shown = [line for index, line in enumerate(lines) if index in kept]
    return between.join([*shown, _left_out(len(lines) - len(shown))])


def _names(line: str, name: str) -> bool:
    """Return True if a line holds a name whole: ``m-25`` is not ``m-250``, nor ``other:m-25``."""
    # The search of plain text is fast, and few lines pass it.
    return name in line and bool(re.search(rf"(?<![\w:-]){re.escape(name)}(?![\w-]|:\w)", line))


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
    whole = ", ".join(parts)
    # Each part by itself: what is cut out of the middle must not be the resolution.
    short = ", ".join(shorten(part, _MAX_PART) for part in parts)
    return whole if len(whole) <= _MAX_LINE else short


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_plain(item) for item in value)
    return str(value)

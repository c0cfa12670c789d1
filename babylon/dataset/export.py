"""``babylon dataset export``: a dataset's rows as other libraries read them, in JSON lines.

=================  =================================================================================
trl                a call: ``prompt``, ``completion``, ``tools``, ``reward`` (the score)
trl-preference     two calls of one group with the same prompt: ``prompt``, ``chosen``, ``rejected``
verifiers          a call as a task: ``prompt``, ``answer`` (the reply given), ``info``
tinker             a call with exact tokens: the fields of ``tinker.Datum`` for importance sampling
atif               a trajectory: Agent Trajectory Interchange Format, version 1.7
openai             a call: ``messages`` and ``tools``, as OpenAI's fine-tuning reads them
=================  =================================================================================

Ground truth is written nowhere. What a format cannot carry is counted under its reason.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from babylon.core.llm_calls import JsonObject, LlmCall
from babylon.core.trajectories import Call
from babylon.dataset.export_names import ExportTarget
from babylon.dataset.messages import call_of
from babylon.dataset.rows import read_rows
from babylon.formats.atif import write_atif
from babylon.formats.export_files import open_new
from babylon.formats.trace import Tokens, Trace, TraceStep, recorded_action

Row = dict[str, Any]
Lines = Iterator[JsonObject]
Left = Counter[str]


def export_dataset(place: Path, target: ExportTarget, output: Path) -> dict[str, object]:
    """Write the file → number of lines, and of what was left out by reason.

    Raises:
        ConfigError: ``place`` has no trajectories.
        DatabaseError: ``output`` exists.
    """
    left: Left = Counter()
    lines = 0
    with open_new(output) as file:
        for line in EXPORTS[target](read_rows(place), left):
            file.write(msgspec.json.encode(line).decode() + "\n")
            lines += 1
    return {"lines": lines, "left_out": dict(left)}


def trl_lines(rows: Iterable[Row], left: Left) -> Lines:
    """Yield conversational prompts and completions, as SFTTrainer and RewardTrainer read them."""
    for row, call in _calls(rows, left):
        tools = {"tools": list(call.tools)} if call.tools else {}
        yield {
            "prompt": list(call.messages),
            "completion": [call.answer],
            **tools,
            "reward": row["score"],
            "group": f"{row['window_id']}/{row['scenario_id']}",
        }


def preference_lines(rows: Iterable[Row], left: Left) -> Lines:
    """Yield pairs of replies to one prompt, better score first. Rows of a window lie together."""
    groups: defaultdict[tuple[str, str, bytes], dict[float, Call]] = defaultdict(dict)
    window = None
    for row, call in _calls(rows, left):
        if row["window_id"] != window:
            yield from _pairs(groups.values(), left)
            groups.clear()
            window = row["window_id"]
        prompt = msgspec.json.encode((call.messages, call.tools))
        # One reply a score: replies with equal scores prefer nothing.
        groups[row["window_id"], row["scenario_id"], prompt].setdefault(row["score"], call)
    yield from _pairs(groups.values(), left)


def _pairs(groups: Iterable[dict[float, Call]], left: Left) -> Lines:
    for replies in groups:
        if len(replies) < 2:
            left["no second reply to the prompt with another score"] += 1
        for high, low in combinations(sorted(replies, reverse=True), 2):
            chosen, rejected = replies[high], replies[low]
            if chosen.answer == rejected.answer:
                left["equal replies"] += 1
                continue
            yield {
                "prompt": list(chosen.messages),
                "chosen": [chosen.answer],
                "rejected": [rejected.answer],
                "margin": high - low,
            }


def verifiers_lines(rows: Iterable[Row], left: Left) -> Lines:
    """Yield the fields of a ``TaskData``: prompt, reply that was given, and its score."""
    for number, (row, call) in enumerate(_calls(rows, left)):
        yield {
            "id": f"{row['trajectory_id']}/{number}",
            "name": row["scenario_id"],
            "prompt": list(call.messages),
            "answer": call.response,
            "info": {"score": row["score"], "pnl_usd": row["pnl_usd"], "tools": list(call.tools)},
        }


def tinker_lines(rows: Iterable[Row], left: Left) -> Lines:
    """Yield data for ``importance_sampling``: every position predicts the next token.

    ``advantages`` are the score minus the mean of the group, on completion tokens; 0 elsewhere.
    """
    for group in _groups(rows):
        mean = sum(row["score"] for row in group) / len(group)
        for row, call in _calls(group, left):
            if call.completion_token_ids is None or call.prompt_token_ids is None:
                left["no exact token ids"] += 1
                continue
            assert call.logprobs is not None
            before = len(call.prompt_token_ids) - 1
            tokens = [*call.prompt_token_ids, *call.completion_token_ids]
            advantage = row["score"] - mean
            yield {
                "model_input": tokens[:-1],
                "loss_fn_inputs": {
                    "target_tokens": tokens[1:],
                    "logprobs": [0.0] * before + list(call.logprobs),
                    "advantages": [0.0] * before + [advantage] * len(call.logprobs),
                },
            }


def atif_lines(rows: Iterable[Row], left: Left) -> Lines:
    """Yield one document for each trajectory, which ``babylon db import`` reads back too."""
    for row in rows:
        calls = [call_of(column) for column in row["calls"]]
        steps = {step["step"]: step for step in row["steps"]}
        yield write_atif(
            Trace(
                trajectory_id=row["trajectory_id"],
                agent_id=row["agent_id"],
                steps=tuple(
                    _trace_step(steps.get(number), [one for one in calls if one.step == number])
                    for number in sorted({one.step for one in calls} | steps.keys())
                ),
                window_id=row["window_id"].partition("+")[0],
                scenario_id=row["scenario_id"],
                start=row["start"],
                end=row["end"],
                final_pnl=row["pnl_usd"],
            )
        )


def _trace_step(step: Row | None, calls: list[Call]) -> TraceStep:
    known = [(index, tokens) for index, call in enumerate(calls) if (tokens := _tokens(call))]
    more: dict[str, Any] = {}
    if step is not None:
        result, error = step["result_json"], step["error"]
        more["action"] = recorded_action(
            {
                "actionType": step["action_type"],
                "success": step["success"],
                "parameters": msgspec.json.decode(step["parameters_json"] or "{}"),
                **({"result": msgspec.json.decode(result)} if result else {}),
                **({"error": error} if error else {}),
            }
        )
        more |= {"at": step["at"], "reward": step["reward"] or 0.0}
    return TraceStep(calls=tuple(map(_llm_call, calls)), tokens=dict(known), **more)


def _tokens(call: Call) -> Tokens | None:
    if call.untrainable:  # validation keeps no policy of such a call
        version = call.policy_version or 0
        return Tokens(policy_version=version, untrainable=call.untrainable, tools=call.tools)
    ids = (call.prompt_token_ids, call.completion_token_ids, call.logprobs)
    if None in ids or call.policy_version is None:
        return None
    prompt, completion, logprobs = ids
    return Tokens(
        prompt_token_ids=prompt or (),
        completion_token_ids=completion or (),
        logprobs=logprobs or (),
        policy_version=call.policy_version,
        tools=call.tools,
    )


def _llm_call(call: Call) -> LlmCall:
    return LlmCall.of_messages(
        call.messages,
        response=call.response,
        temperature=call.temperature,
        top_p=call.top_p,
        tool_calls=call.tool_calls,
        reasoning=call.reasoning,
    )


def openai_lines(rows: Iterable[Row], left: Left) -> Lines:
    """Yield conversations. OpenAI's format knows no reasoning, so that part is left out."""
    for _, call in _calls(rows, left):
        messages = [
            {name: value for name, value in message.items() if name != "reasoning"}
            for message in (*call.messages, call.answer)
        ]
        yield {"messages": messages, **({"tools": list(call.tools)} if call.tools else {})}


def _calls(rows: Iterable[Row], left: Left) -> Iterator[tuple[Row, Call]]:
    """Yield the policy's own replies: one that was forced or edited is nothing to learn from."""
    for row in rows:
        for column in row["calls"]:
            call = call_of(column)
            if call.untrainable:
                left["not sampled from the policy alone"] += 1
            else:
                yield row, call


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each window and scenario; rows of a window lie together."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = (row["window_id"], row["scenario_id"])
        if groups and key[0] != next(iter(groups))[0]:
            yield from groups.values()
            groups = {}
        groups.setdefault(key, []).append(row)
    yield from groups.values()


EXPORTS: dict[ExportTarget, Callable[[Iterable[Row], Left], Lines]] = {
    ExportTarget.TRL: trl_lines,
    ExportTarget.TRL_PREFERENCE: preference_lines,
    ExportTarget.VERIFIERS: verifiers_lines,
    ExportTarget.TINKER: tinker_lines,
    ExportTarget.ATIF: atif_lines,
    ExportTarget.OPENAI: openai_lines,
}

"""Rows of both writers, and everything that may be wrong with one: deterministic by seed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

from babylon.core.game_rows import GameRow
from tests.unit.quality.rows import WINDOW, call, compact, real_rows, row, step

_STEPS = 6  # of a real row: what breaks in thirty breaks in six, five times as fast
_TEXTS = ("steps_json", "steps_json", "metrics_json", "metadata_json", "reward_components_json")
_SNIPPETS = (
    *("\\u0000", "\\ud800", "\\", '"', ",", ":", "{", "}", "[", "]", "null", "NaN", "-Infinity"),
    *("1e999", "-1e999", "9" * 30, "9" * 400, '{"a":1,"a":2}', "[" * 300, '{"a":' * 300),
    *(
        "\x01",
        "\x7f",
        "\u2028",
        "😀",
        "é",
        "\ufeff",
        " ",
        "\n",
        "/*",
        "0x1F",
        "01",
        "-",
        "1.",
        "--",
    ),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, 10**400),
    *("", " ", "x" * 1000, "pending", "evaluation", "NaN", "\0", "\u202e", "😀", [], {}, [[]]),
    *({"": ""}, {"a": {"b": [None]}}, [0] * 50, float("nan"), float("inf")),
)
_KEYS = ("llmCalls", "action", "stepNumber", "environmentState", "response", "purpose", "", "$[0]")


def mutated_rows(count: int, seed: int = 0) -> Iterator[GameRow]:
    """``count`` rows, each with one to three faults or none; ids are in their order."""
    sound = sound_rows()
    for number in range(count):
        random = Random(f"{seed}:{number}")
        one = random.choice(sound)
        for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
            one = random.choice(_MUTATIONS)(one, random)
        yield replace(one, trajectory_id=f"fuzz-{number:07d}")


def sound_rows() -> list[GameRow]:
    """Real rows cut short, the older writer's, the live coordinator's, and one with its tokens."""
    short = []
    for real in real_rows()[:7]:
        steps = json.loads(real.steps_json)[:_STEPS]
        short.append(replace(real, steps_json=compact(steps)))
    return [*short, older_row(), recorded_row()]


def older_row() -> GameRow:
    """Without a window id, with the second writer's own keys."""
    return row([older_step(number) for number in range(_STEPS)], window_id=None)


def older_step(number: int, **changes: Any) -> dict[str, Any]:
    asked = call(promptTokens=90, completionTokens=9, latencyMs=31, callId=f"c-{number}")
    act = {"actionType": "HOLD", "actionName": "hold", "parameters": {}, "success": True}
    return step(
        number,
        **{
            "stepId": f"s-{number}",
            "observation": {"mood": "calm"},
            "done": False,
            "llmCalls": [asked],
            "action": {**act, "attemptId": f"a-{number}", "timestamp": 1763110920020 + number},
            **changes,
        },
    )


def recorded_row() -> GameRow:
    """Joined with the game's call log and the gateway's calls; outcomes decide its trades."""
    bought = {"actionType": "BUY_SHARES", "parameters": {"marketId": "m1", "side": "YES"}}
    opened = {"actionType": "OPEN_PERP_POSITION", "parameters": {"ticker": "T", "side": "long"}}
    steps = [step(n, action={**(opened if n % 2 else bought), "success": True}) for n in range(6)]
    messages = compact(
        [{"role": "system", "content": "You trade."}, {"role": "user", "content": "Trade?"}]
    )
    logs = {f"t1-call-{n}-0": ["HOLD", messages, 0.9] for n in range(6)}
    gateway = [
        {
            "call_id": f"c{n}",
            "agent_id": "agent-1",
            "trajectory_id": "t1",
            "step_number": n,
            "route_version": 1,
            "model": "babylon-v3",
            "messages": messages,
            "response": "HOLD",
            "temperature": 1,
            "top_p": 1,
            "policy_version": 3,
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3],
            "logprobs": [-0.5],
            "max_tokens": 64,
            "seed": None,
            "finish_reason": "stop",
            "trainable": True,
            "untrainable_reason": None,
            "started_at": "2025-11-14T09:02:00+00:00",
            "latency_ms": 3,
        }
        for n in range(6)
    ]
    outcomes = [
        {"predictionMarketId": "m1", "outcome": "YES", "finalProbability": 0.6},
        {"stockTicker": "T", "startPrice": 10.0, "endPrice": 11.0},
    ]
    return replace(
        row(steps),
        logs_json=compact(logs),
        gateway_json=compact(gateway),
        outcomes_json=compact(outcomes),
    )


def _in_text(one: GameRow, random: Random) -> GameRow:
    """Cut, lose, double or insert characters of one JSON column."""
    column = random.choice(_TEXTS)
    text: str = getattr(one, column)
    low, high = sorted(random.randrange(len(text) + 1) for _ in range(2))
    high = min(high, low + 40)
    changed = random.choice(
        (
            text[:low],
            text[low:],
            text[:low] + text[high:],
            text[:high] + text[low:],
            text[:low] + random.choice(_SNIPPETS) + text[low:],
            text[:low] + random.choice(_SNIPPETS) + text[high:],
        )
    )
    return replace(one, **{column: changed})


def _in_tree(one: GameRow, random: Random) -> GameRow:
    """Another value, another key, one element less or twice; then written in one of three ways."""
    column = random.choice(_TEXTS)
    try:
        document = json.loads(getattr(one, column))
    except (ValueError, RecursionError):
        return one
    place = document
    while isinstance(place, list | dict) and place:
        key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, list | dict) or not inner or random.random() < 0.3:
            _change(place, key, random)
            break
        place = inner
    written: tuple[Callable[[Any], str], ...] = (compact, compact, json.dumps, _pretty)
    text = random.choice(written)(document)
    return replace(one, **{column: text.encode(errors="replace").decode()})  # as Postgres has it


def _change(place: Any, key: Any, random: Random) -> None:
    what = random.randrange(5)
    if what == 0:
        del place[key]
    elif what == 1 and isinstance(place, list):
        place.insert(key, place[key])
    elif what == 2 and isinstance(place, list):
        random.shuffle(place)
    elif what == 3 and isinstance(place, dict):
        place[random.choice(_KEYS)] = place.pop(key)
    else:
        place[key] = random.choice(_VALUES)


def _pretty(document: Any) -> str:
    return json.dumps(document, indent=1)


def _in_play(one: GameRow, random: Random) -> GameRow:
    """An agent that stopped early, never started, or got no answer."""
    try:
        steps = json.loads(one.steps_json)
        act = random.randrange(4)
        if act == 0:
            steps = steps[: random.randrange(len(steps))]
        elif act == 1:
            steps[-1]["action"]["actionType"] = "pending"
        elif act == 2:
            random.choice(steps)["llmCalls"][0]["response"] = random.choice(("", " ", None))
        else:
            steps[0]["llmCalls"][0] |= {"systemPrompt": "", "userPrompt": ""}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return one  # another fault was there before
    return replace(one, steps_json=compact(steps).encode(errors="replace").decode())


def _in_columns(one: GameRow, random: Random) -> GameRow:
    huge = (float("nan"), float("inf"), -1e308, 1e308, 0.0)
    changes: tuple[dict[str, Any], ...] = (
        {"start": None},
        {"end": None},
        {"start": WINDOW.end},
        {"start": WINDOW.start - timedelta(microseconds=1)},
        {"start": WINDOW.start},
        {"window_id": None},
        {"window_id": ""},
        {"scenario_id": ""},
        {"scenario_id": "s" * 100},
        {"total_reward": random.choice(huge)},
        {"final_pnl_usd": random.choice(huge)},
        {"final_pnl_usd": None},
        {"agent_id": ""},
    )
    return replace(one, **random.choice(changes))


def _in_joined(one: GameRow, random: Random) -> GameRow:
    """Of call logs and outcomes only what their columns can hold: text may be any, types not."""
    logs = json.loads(one.logs_json)
    for log in random.sample(list(logs.values()), len(logs) // 2):
        log[1] = random.choice(
            (None, "", "[]", "{", '[{"role":1}]', "[" * 300, '[{"role":"a","content":"\\ud800"}]')
        )
        log[2] = random.choice((None, 0.5, -1.0))
    gateway = json.loads(one.gateway_json)
    for recorded in random.sample(gateway, len(gateway) // 2):
        recorded["step_number"] = random.randrange(9)
        recorded["logprobs"] = random.choice(([], [-0.5, -0.5]))
        recorded["messages"] = random.choice(("", "[]", recorded["messages"], "{}", "nonsense"))
    outcomes = json.loads(one.outcomes_json)
    for outcome in outcomes:
        for name in ("outcome", "startPrice", "endPrice"):
            outcome[name] = random.choice((None, "NaN", "maybe", "NO", 0, -3.5, 1e-300, 7.25))
    random.shuffle(gateway)
    return replace(
        one,
        logs_json=compact(logs),
        gateway_json=compact(gateway + gateway[:1]),
        outcomes_json=compact(outcomes),
    )


_MUTATIONS = (_in_text, _in_text, _in_tree, _in_tree, _in_tree, _in_play, _in_columns, _in_joined)

"""Rows of recorded play in bulk, for ``benchmarks.collect``.

The steps have the keys, texts and kinds of numbers of the game's rows of 2025-11-14, and Postgres
compresses both equally well (pglz to between an eighth and a seventh; a test compares them). The
game's trajectories have about 30 steps and 25 KB. These have 81 steps and 65 KB of ``stepsJson``,
and on request one row of ``llm_call_logs`` per step.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from random import Random
from typing import Any

import asyncpg
import orjson

from babylon.core.windows import parse_window_id

Row = tuple[object, ...]
WINDOW = parse_window_id("2025-11-14T09:00")
STEPS = 81
AGENTS = 50
DISTINCT = 300  # distinct plays, repeated; far enough apart for no compression to profit
OTHERS_PER_WINDOW = 1000
_TICKERS = ("$BTC", "$SOL", "$ETH", "$WIF", "$TRUMP", "$DOGE", "$PEPE")
_STRATEGIES = (
    *(("aggressive", 0.8), ("momentum", 0.7), ("balanced", 0.5), ("contrarian", 0.4)),
    ("conservative", 0.2),
)
_ACTIONS, _SHARES = ("HOLD", "BUY_SHARES", "SELL_SHARES"), (84, 10, 6)


def trajectories(count: int) -> Iterator[tuple[Row, list[Row]]]:
    """Yield each trajectory's row and its calls' rows, in the order of the columns below."""
    for number in range(count):
        played = _played(number % DISTINCT)
        start = WINDOW.start + timedelta(seconds=number % 3000)
        name = f"bench-{number:06d}"
        row = (
            *(name, name, f"agent-{number % AGENTS}"),
            *(_game(start), _game(start + timedelta(seconds=STEPS)), 1000 * STEPS, WINDOW.id),
            *(WINDOW.id, played[0], '{"environmentReward":0.125}'),
            '{"episodeLength":81,"finalStatus":"completed","finalBalance":10012.5,"finalPnL":12.5,'
            '"tradesExecuted":12,"postsCreated":0,"errorCount":0}',
            '{"isTrainingData":true,"gameKnowledge":{}}',
            *(1.5, STEPS, "completed", 1012.5, number % 100 - 50.0, _game(start)),
        )
        yield row, [_log(name, index, texts, start) for index, texts in enumerate(played[1])]


@cache
def _played(number: int) -> tuple[str, list[tuple[str, str, str, str]]]:
    """Return (``stepsJson``, each call's two prompts, messages and reply)."""
    random = Random(f"collect:{number}")
    strategy, pnl, steps, calls = random.choice(_STRATEGIES), 0.0, [], []
    for index in range(STEPS):
        step = _step(random, index, strategy, pnl)
        pnl += 100 * step["reward"]
        call = step["llmCalls"][0]
        prompts = call["systemPrompt"], call["userPrompt"]
        roles = zip(("system", "user"), prompts, strict=True)
        messages = _json([{"role": role, "content": text} for role, text in roles])
        steps.append(step)
        calls.append((*prompts, messages, call["response"]))
    return _json(steps), calls


TRAJECTORY_COLUMNS = (
    *("id", "trajectoryId", "agentId", "startTime", "endTime", "durationMs", "windowId"),
    *("scenarioId", "stepsJson", "rewardComponentsJson", "metricsJson", "metadataJson"),
    *("totalReward", "episodeLength", "finalStatus", "finalBalance", "finalPnL", "updatedAt"),
)
LOG_COLUMNS = (
    *("id", "trajectoryId", "stepId", "callId", "timestamp", "model", "purpose", "systemPrompt"),
    *("userPrompt", "messagesJson", "response", "temperature", "maxTokens", "metadata"),
)


async def fill(
    connection: "asyncpg.Connection[asyncpg.Record]", count: int, with_logs: bool = True
) -> int:
    """Write ``count`` trajectories in batches and return the bytes of ``stepsJson``."""
    await connection.execute(
        "INSERT INTO \"User\" (id) SELECT 'agent-' || n FROM generate_series(0, $1::int) n",
        AGENTS - 1,
    )
    size = 0
    rows: list[Row] = []
    logs: list[Row] = []
    for number, (row, of_calls) in enumerate(trajectories(count), start=1):
        rows.append(row)
        logs += of_calls if with_logs else []
        size += len(str(row[8]))  # stepsJson
        if number % 200 == 0 or number == count:
            await connection.copy_records_to_table(
                "trajectories", records=rows, columns=TRAJECTORY_COLUMNS
            )
            await connection.copy_records_to_table(
                "llm_call_logs", records=logs, columns=LOG_COLUMNS
            )
            rows, logs = [], []
    return size


async def fill_others(connection: "asyncpg.Connection[asyncpg.Record]", count: int) -> None:
    """Write ``count`` small rows of other windows."""
    await connection.execute(
        """
        INSERT INTO trajectories ("id", "trajectoryId", "agentId", "startTime", "endTime",
            "durationMs", "windowId", "stepsJson", "rewardComponentsJson", "metricsJson",
            "metadataJson", "totalReward", "episodeLength", "finalStatus", "updatedAt")
        SELECT 'other-' || n, 'other-' || n, 'agent-0', at, at, 0,
            to_char(date_trunc('hour', at), 'YYYY-MM-DD"T"HH24:MI'), '[]', '{}', '{}', '{}',
            0, 0, 'completed', at
        FROM generate_series(1, $1::int) n,
            LATERAL (SELECT timestamp '2025-11-14 08:30' - (n / $2::int) * interval '1 hour') t(at)
        """,
        count,
        OTHERS_PER_WINDOW,
    )


def _step(random: Random, index: int, strategy: tuple[str, float], pnl: float) -> dict[str, Any]:
    moment = int(WINDOW.start.timestamp() * 1000) + 1500 * index + random.randrange(900)
    ticker, price = random.choice(_TICKERS), random.uniform(100, 150)
    (act,) = random.choices(_ACTIONS, _SHARES)
    name, risk = strategy
    gain = 0 if act == "HOLD" else random.uniform(-40, 80)
    action: dict[str, Any] = {"actionType": act, "parameters": {}, "success": True}
    if act == "HOLD":
        action["result"] = {"held": True}
    else:
        action["parameters"] = {
            "ticker": ticker,
            "shares": random.randrange(10, 60),
            "price": price,
        }
        action["result"] = {"executed": True, "pnl": gain}
        action["reasoning"] = f"Executed {act} based on {name} strategy"
    return {
        "stepNumber": index,
        "timestamp": moment,
        "environmentState": {
            "agentBalance": 10000 + pnl if pnl else 10000,
            "agentPnL": pnl or 0,
            "openPositions": random.randrange(5),
            "activeMarkets": random.randrange(10, 30),
        },
        "providerAccesses": [
            {
                "providerName": "market_data",
                "data": {
                    "ticker": ticker,
                    "price": price,
                    "volume": random.uniform(100_000, 1_000_000),
                    "sentiment": random.choice(("BULLISH", "BEARISH")),
                },
                "purpose": "get_market_data",
            }
        ],
        "llmCalls": [
            {
                "model": "gpt-4o-mini",
                "systemPrompt": f"You are a {name} trading agent with risk tolerance {risk}",
                "userPrompt": f"Current price: {ticker} at ${price:.2f}. Should you trade?",
                "response": act,
                "reasoning": f"Market sentiment and my {name} strategy suggests: {act}",
                "temperature": 0.7,
                "maxTokens": 150,
                "purpose": "action",
                "actionType": act,
            }
        ],
        "action": action,
        "reward": gain / 100 if gain else 0,
    }


def _log(name: str, step: int, texts: tuple[str, ...], start: datetime) -> Row:
    call_id = f"{name}-call-{step}-0"
    moment = _game(start + timedelta(seconds=step))
    identity = (call_id, name, f"{name}-step-{step}", call_id, moment, "gpt-4o-mini", "action")
    return (*identity, *texts, 0.7, 150, "{}")


def _game(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None)


def _json(value: object) -> str:
    """Encode as JSON, with numbers as JavaScript writes them."""
    return orjson.dumps(value).decode()

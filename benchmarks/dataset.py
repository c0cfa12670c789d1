"""Measure how long 10,000 trajectories take from the scored rows to files ready for a commit.

``python -m benchmarks.dataset``: the rows are 650 MB of JSON in ten windows. Every observation is a
text of its own, and each call has token ids and logprobs.
"""

import argparse
import json
import random
import re
import resource
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import polars as pl

from babylon.core.artifacts import ArtifactWriter
from babylon.core.home import Home
from babylon.core.llm_calls import Message
from babylon.core.trajectories import TRAJECTORY_SCHEMA, Call, iter_trajectories
from babylon.core.types import Claim, Scored
from babylon.dataset.outcomes import outcome_rows
from babylon.dataset.performance import played_rows
from babylon.dataset.scenarios import scenario_rows
from babylon.dataset.schema import OUTCOMES, PERFORMANCE, SCENARIOS, TRAJECTORIES
from babylon.dataset.table_file import TableName, write_table
from babylon.dataset.trajectories import Selection, trajectory_rows

START = datetime(2025, 11, 14, tzinfo=UTC)
SYSTEM = (
    "You are a trader in a market of predictions and perpetuals. " * 12 + "Answer with one object."
)
WORDS = (
    "the price of this market rose after a report about its question while traders sold their",
    "shares and bought perpetuals again because nobody knew what the vote would bring today in",
    "spite of news that an official had denied it before noon",
)
VOCABULARY = " ".join(WORDS).split()
PIECE = re.compile(r" ?[A-Za-z]{1,6}|\d{1,2}|\W")


def _tokens(text: str) -> tuple[int, ...]:
    """Return an id for each piece of the text, as a tokenizer gives about four letters one."""
    return tuple(crc32(piece.encode()) % 150_000 for piece in PIECE.findall(text))


def float32(value: float) -> float:
    """Return the value as the database keeps a logprob."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _steps(random: random.Random, steps: int) -> tuple[list[Call], list[dict[str, Any]]]:
    calls, game = [], []
    for step in range(steps):
        lines = [
            f"{' '.join(random.choices(VOCABULARY, k=14))} {random.random() * 1000:.2f}"
            for _ in range(14)
        ]
        reply = json.dumps(
            {"action": "hold", "reasoning": " ".join(random.choices(VOCABULARY, k=30))}
        )
        prompt = "\n".join(lines)
        messages: tuple[Message, ...] = (
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": prompt},
        )
        calls.append(
            Call(
                step=step,
                messages=messages,
                response=reply,
                policy_version=3,
                prompt_token_ids=_tokens(SYSTEM + prompt),
                completion_token_ids=(sampled := _tokens(reply)),
                logprobs=tuple(-float32(random.random() ** 4) for _ in sampled),
            )
        )
        game.append(_game_step(random, step, prompt, reply))
    return calls, game


def _game_step(random: random.Random, step: int, prompt: str, reply: str) -> dict[str, Any]:
    """Return the step as the game writes it, with the texts of the call once more."""
    action = {
        "actionType": "BUY_SHARES",
        "success": True,
        "parameters": {"marketId": f"m{step}", "amount": random.random()},
        "result": {"shares": random.random()},
    }
    call = {
        "systemPrompt": SYSTEM,
        "userPrompt": prompt,
        "response": reply,
        "model": "m",
        "temperature": 1.0,
        "purpose": "action",
    }
    return {
        "stepNumber": step,
        "timestamp": START.timestamp() * 1000 + step,
        "environmentState": {"agentBalance": random.random() * 1000, "agentPnL": 1.0},
        "llmCalls": [call],
        "action": action,
        "reward": random.random(),
    }


def _rows(window: str, count: int, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    drawn = random.Random(seed)
    for number in range(count):
        calls, game = _steps(drawn, steps)
        yield {
            "trajectory_id": f"{window}-{number}",
            "agent_id": f"agent-{number}",
            "window_id": window,
            "scenario_id": window,
            "start": START,
            "end": START,
            "pnl_usd": drawn.gauss(0, 30),
            "drawdown_usd": 0.0,
            "wins": 1,
            "trades": 2,
            "actions": steps,
            "steps": steps,
            "calls_json": msgspec.json.encode(calls).decode(),
            "game_json": msgspec.json.encode(game).decode(),
            "knowledge_json": '{"game_knowledge":{},"market_outcomes":[]}',
            "step_rewards_json": "[]",
            "score": drawn.random(),
        }


def make(home: Home, windows: int, each: int, steps: int) -> tuple[list[Scored], int]:
    """Write the scored windows → (manifests, bytes of JSON)."""
    schema = pl.Schema([*TRAJECTORY_SCHEMA.items(), ("score", pl.Float64)])
    made, size = [], 0
    for number in range(windows):
        window = (START + timedelta(hours=number)).strftime("%Y-%m-%dT%H:%M")
        with ArtifactWriter(home, schema, window_id=window, stage="scored") as writer:
            rows = list(_rows(window, each, steps, number))
            size += sum(len(v) for row in rows for k, v in row.items() if k.endswith("_json"))
            for begin in range(0, each, 100):
                part = rows[begin : begin + 100]
                writer.write({name: [row[name] for row in part] for name in schema})
        made.append(
            Scored(
                claim=Claim(window_id=window, epoch=1, owner="benchmark"),
                artifact=writer.artifact,
                eligible=each,
                agents=each,
                scorer="heuristic",
                avg_reward=0.0,
            )
        )
    return made, size


def _performance(home: Home, scored: Scored) -> list[dict[str, Any]]:
    """Return the measurements of play; those of a gate are two rows from Postgres."""
    return [
        {**row, "window_id": "w"} for row in played_rows(iter_trajectories(home, scored.artifact))
    ]


def measure(home: Home, made: Sequence[Scored], size: int) -> dict[str, float]:
    """Write the four tables of each window → figures. Memory is the process's highest so far."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    written = 0
    for scored in made:
        tables: dict[str, Iterable[list[dict[str, Any]]]] = {
            TRAJECTORIES: trajectory_rows(home, scored, {}, Selection()),
            SCENARIOS: (scenario_rows(home, scored, Selection()) for _ in range(1)),
            OUTCOMES: outcome_rows(home, scored),
            PERFORMANCE: (_performance(home, scored) for _ in range(1)),
        }
        for config, rows in tables.items():
            name = TableName(config, scored.claim.window_id)
            written += Path(home.resolve(write_table(home, name, rows).uri)).stat().st_size
    wall = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "trajectories": sum(one.artifact.rows for one in made),
        "json_mb": round(size / 1e6),
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1024),
        "written_mb": round(written / 1e6, 1),
        "times_smaller": round(size / written, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--each", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--made", type=Path, help="Folder of an earlier run's rows.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Home.at(arguments.made or directory)
        manifest = home.root / "made.json"
        if not manifest.exists():
            made, size = make(home, arguments.windows, arguments.each, arguments.steps)
            manifest.write_bytes(msgspec.json.encode((made, size)))
        made, size = msgspec.json.decode(manifest.read_bytes(), type=tuple[list[Scored], int])
        print(json.dumps(measure(home, made, size)))


if __name__ == "__main__":
    main()

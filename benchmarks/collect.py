"""Speed of collecting and validating a window, compared with simpler ways to read its rows.

    python -m benchmarks.collect [--rows 5000] [--rounds 3] [--logs] [--json FILE]

Prints a Markdown table: wall time (absolute, and relative to ``ceiling`` and ``plain``), CPU time
and peak memory of each way, medians over the rounds. All ways read the same rows from one embedded
Postgres: 65 KB of ``stepsJson`` per trajectory, with ``--logs`` also 81 rows of ``llm_call_logs``
(23 KB).

    ceiling   COPY of the columns that collecting needs, discarded: the fastest that Postgres can do
    typed     a cursor, and the steps decoded as typed records: no check, no file
    packed    a cursor, and the rows in one Parquet file: no check, nothing decoded
    plain     ``fetch`` of everything, ``json.loads``, pydantic models: no check, no file
    ours      collect (calls joined) and validate, each with its Parquet file

``typed`` and ``packed`` bound the time that ``ours`` needs for decoding and for writing. The ways
take turns, each in its own process. Times count from the open connection on; peak memory is the
whole process's. The tables are as the game declares them (compressed by Postgres), or with
``--storage external`` as our migration makes them. The last line is the time of a small window
before and after ``--others`` rows of other windows join the table.
"""

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import polars as pl
from pydantic import BaseModel

from babylon.core.artifacts import ArtifactWriter
from babylon.core.game_rows import COLUMNS, GAME_SCHEMA
from babylon.core.home import Home
from babylon.core.settings_loading import load_settings
from babylon.quality.decode import GameStep
from babylon.stages.collect import collect_window
from babylon.stages.validate import validate_window
from babylon.store import open_store
from babylon.store.address import parse_url
from babylon.store.embedded import EmbeddedPostgres
from babylon.store.migrate import migrate
from babylon.store.windows import claim_window
from benchmarks.collect_rows import WINDOW, fill, fill_others

Figures = dict[str, float]
Report = dict[str, Any]
SMALL = 200  # trajectories of the small window; its time must not grow with the table
_COMPRESSED = """
ALTER TABLE trajectories ALTER "stepsJson" SET STORAGE EXTENDED,
    ALTER "metadataJson" SET STORAGE EXTENDED;
ALTER TABLE llm_call_logs ALTER "systemPrompt" SET STORAGE EXTENDED,
    ALTER "userPrompt" SET STORAGE EXTENDED, ALTER "messagesJson" SET STORAGE EXTENDED,
    ALTER response SET STORAGE EXTENDED, ALTER reasoning SET STORAGE EXTENDED
"""
_TRAJECTORIES = f"""SELECT {COLUMNS} FROM trajectories t WHERE t."windowId" = '{WINDOW.id}'"""
_LOGS = f"""
    SELECT l."trajectoryId", l."callId", l.response, l."messagesJson", l."topP"
    FROM llm_call_logs l JOIN trajectories t USING ("trajectoryId")
    WHERE t."windowId" = '{WINDOW.id}'
"""


async def ceiling(url: str, home: Path) -> Figures:
    """Copy the two tables and discard the bytes."""

    async def discard(data: bytes) -> None:
        pass

    connection = await asyncpg.connect(url)
    measured = _Clock()
    for query in (_TRAJECTORIES, _LOGS):
        await connection.copy_from_query(query, output=discard, format="binary")
    report = measured.report()
    await connection.close()
    return report


async def typed(url: str, home: Path) -> Figures:
    """Decode the steps; fetch the logs without decoding them."""
    decoder = msgspec.json.Decoder(tuple[GameStep, ...])
    connection = await asyncpg.connect(url)
    measured = _Clock()
    async for rows in _batches(connection, _TRAJECTORIES):
        for row in rows:
            decoder.decode(row["steps_json"])
    async for _ in _batches(connection, _LOGS):
        pass
    report = measured.report()
    await connection.close()
    return report


async def packed(url: str, home: Path) -> Figures:
    """Write one file per table."""
    connection = await asyncpg.connect(url)
    measured = _Clock()
    for query, schema in ((_TRAJECTORIES, _READ), (_LOGS, _LOGGED)):
        async with ArtifactWriter(Home.at(home), schema, window_id=WINDOW.id) as writer:
            async for rows in _batches(connection, query):
                writer.write(
                    pl.DataFrame([tuple(row) for row in rows], schema=schema, orient="row")
                )
    report = measured.report()
    await connection.close()
    return report


_READ = pl.Schema(list(GAME_SCHEMA.items())[: COLUMNS.count(" AS ")])
_LOGGED = pl.Schema(
    [(name, pl.String) for name in ("trajectory", "call", "response", "messages_json")]
    + [("top_p", pl.Float64)]
)


async def _batches(
    connection: "asyncpg.Connection[asyncpg.Record]", query: str
) -> AsyncIterator[list[asyncpg.Record]]:
    async with connection.transaction(readonly=True):
        cursor = await connection.cursor(query)
        while rows := await cursor.fetch(50):
            yield rows


async def plain(url: str, home: Path) -> Figures:
    """Fetch everything at once, then make dictionaries, then models."""
    connection = await asyncpg.connect(url)
    measured = _Clock()
    rows = await connection.fetch(_TRAJECTORIES)
    logged = await connection.fetch(_LOGS)
    logs = [_Log(call_id=row[1], response=row[2], messages=json.loads(row[3])) for row in logged]
    models = [
        _Trajectory(
            trajectory_id=row["trajectory_id"],
            agent_id=row["agent_id"],
            steps=json.loads(row["steps_json"]),
            metrics=json.loads(row["metrics_json"]),
            metadata=json.loads(row["metadata_json"]),
        )
        for row in rows
    ]
    report = measured.report(rows=len(models), logs=len(logs))
    await connection.close()
    return report


async def ours(url: str, home: Path) -> Figures:
    """Run the two stages."""
    settings = load_settings(database={"url": url}, home=home)
    async with open_store(settings) as store:
        claim = await claim_window(store, WINDOW, owner="benchmark", lease_s=3600)
        measured = _Clock()
        collected = await collect_window(store, settings.home, claim, WINDOW)
        collect_s = measured.wall_s
        validated = await validate_window(store, settings, collected)
        report = measured.report(
            rows=validated.artifact.rows,
            collect_s=collect_s,
            validate_s=measured.wall_s - collect_s,
        )
    return report


WAYS: dict[str, Callable[[str, Path], Coroutine[None, None, Figures]]] = {
    "ceiling": ceiling,
    "typed": typed,
    "packed": packed,
    "plain": plain,
    "ours": ours,
}


def measure(way: str, url: str) -> Figures:
    """Measure one way in its own process and home."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "benchmarks.collect", "--way", way, "--url", url]
        finished = subprocess.run(
            [*command, "--home", home], stdout=subprocess.PIPE, text=True, check=True
        )
        report: Figures = json.loads(finished.stdout)
        return report


def compare(url: str, rounds: int, ways: list[str]) -> dict[str, Figures]:
    """Return the median of each figure. The ways take turns, so other load affects all of them."""
    measure("ceiling", url)  # warms the page cache
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            runs[way].append(measure(way, url))
            print(way, runs[way][-1], file=sys.stderr, flush=True)
    return {
        way: {name: statistics.median(run[name] for run in own) for name in own[0]}
        for way, own in runs.items()
    }


def beside_others(server: EmbeddedPostgres, others: int, rounds: int) -> Figures:
    """Time a small window, alone and in a table of many other rows."""
    url = asyncio.run(_table(server, "small", SMALL, "external", logs=False))
    alone = compare(url, rounds, ["ours"])["ours"]["wall_s"]
    asyncio.run(_with(url, fill_others, others))
    asyncio.run(_with(url, _execute, "ANALYZE"))  # autovacuum would do this a minute later
    beside = compare(url, rounds, ["ours"])["ours"]["wall_s"]
    return {"others": others, "alone_s": alone, "beside_others_s": beside}


async def _table(
    server: EmbeddedPostgres, name: str, rows: int, storage: str, *, logs: bool
) -> str:
    await _with(server.url("postgres"), _execute, f"CREATE DATABASE {name}")
    url = server.url(name)
    await migrate(parse_url(url))
    if storage == "pglz":
        await _with(url, _execute, _COMPRESSED)
    size = await _with(url, fill, rows, logs)
    print(f"{rows} trajectories, {size / rows / 1000:.1f} KB each ({storage})", file=sys.stderr)
    await _with(url, _execute, "VACUUM ANALYZE")
    return url


async def _execute(connection: "asyncpg.Connection[asyncpg.Record]", sql: str) -> None:
    await connection.execute(sql)


async def _with(url: str, work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await work(connection, *arguments)
    finally:
        await connection.close()


class _Clock:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._wall

    def report(self, **more: float) -> Figures:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cpu_s = time.process_time() - self._cpu
        return {"wall_s": self.wall_s, "cpu_s": cpu_s, "peak_mb": peak, **more}


class _LlmCall(BaseModel):
    model: str
    systemPrompt: str
    userPrompt: str
    response: str
    temperature: float
    maxTokens: int
    purpose: str
    reasoning: str | None = None
    actionType: str | None = None


class _Provider(BaseModel):
    providerName: str
    data: dict[str, object]
    purpose: str


class _Action(BaseModel):
    actionType: str
    parameters: dict[str, object]
    success: bool
    result: dict[str, object] | None = None
    reasoning: str | None = None


class _State(BaseModel):
    agentBalance: float
    agentPnL: float
    openPositions: int
    activeMarkets: int = 0


class _Step(BaseModel):
    stepNumber: int
    timestamp: int
    environmentState: _State
    providerAccesses: list[_Provider]
    llmCalls: list[_LlmCall]
    action: _Action
    reward: float


class _Message(BaseModel):
    role: str
    content: str


class _Log(BaseModel):
    call_id: str
    response: str
    messages: list[_Message]


class _Trajectory(BaseModel):
    trajectory_id: str
    agent_id: str
    steps: list[_Step]
    metrics: dict[str, object]
    metadata: dict[str, object]


def table(report: Report) -> str:
    """Return a Markdown table."""
    lines = [
        "| way | wall | of ceiling | of plain | CPU | peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    ways = report["ways"]
    for way, figures in ways.items():
        shares = " | ".join(
            f"{figures['wall_s'] / ways[base]['wall_s']:.2f}" if base in ways else ""
            for base in ("ceiling", "plain")
        )
        stages = (
            f" (collect {figures['collect_s']:.2f}, validate {figures['validate_s']:.2f})"
            if "collect_s" in figures
            else ""
        )
        lines.append(
            f"| {way} | {figures['wall_s']:.2f} s{stages} | {shares}"
            f" | {figures['cpu_s']:.2f} s | {figures['peak_mb']:.0f} MB |"
        )
    beside = report.get("beside")
    if beside:
        lines.append(
            f"\n{SMALL} trajectories alone {beside['alone_s']:.3f} s, in a table of"
            f" {beside['others']} others {beside['beside_others_s']:.3f} s"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--others", type=int, default=1_000_000, help="0: do not measure")
    parser.add_argument("--logs", action="store_true", help="include the game's log of each call")
    parser.add_argument("--storage", choices=["pglz", "external"], default="pglz")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path)
    for inner in ("--way", "--url", "--home"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(asyncio.run(WAYS[options.way](options.url, Path(options.home)))))
        return
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        server = EmbeddedPostgres(Path(home))
        server.acquire()
        try:
            url = asyncio.run(
                _table(server, "recorded", options.rows, options.storage, logs=options.logs)
            )
            report: Report = {name: getattr(options, name) for name in ("rows", "storage", "logs")}
            report["ways"] = compare(url, options.rounds, options.ways)
            if options.others:
                report["beside"] = beside_others(server, options.others, options.rounds)
        finally:
            server.release()
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

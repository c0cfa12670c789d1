"""Four workers of two overlapping deployments, struck at random: no learning is lost.

Workers are killed or halted past their lease, and Postgres is killed. A strike counts if the worker
had a window in work. The gate is the real one, on a task with a small budget. Each promotion must
descend from the champion before it, and each trajectory must end in the champion's line or in a
candidate that was judged and rejected.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.windows import DONE, Window
from babylon.store import Store, open_store
from babylon.store.attempts import list_attempts
from babylon.store.connection import UNREACHABLE
from babylon.store.embedded import EmbeddedPostgres
from babylon.store.policies import Policy, ensure_base, list_policies
from babylon.store.routes import all_routes
from babylon.store.windows import list_windows
from tests.faults import letters
from tests.faults.processes import Worker, start_server
from tests.faults.world import WHOLE
from tests.integration.test_window_machine import PLAY
from tests.speaking_policy import save_speaking_policy

LEASE_S = 2.0
ORDERS = ("oldest", "oldest", "newest", "any")  # hourly-training twice, backfill, one-window
EACH = 3  # trajectories a window
STRUCK = 0.2  # probability of a strike at a look at the workers, so that it meets any stage
# `make faults` takes the full size: six minutes of processor time
WINDOWS = int(os.environ.get("BABYLON_FAULT_WINDOWS", "200" if WHOLE else "6"))
KILLS = int(os.environ.get("BABYLON_FAULT_KILLS", "200" if WHOLE else "2"))
HALTS = max(1, KILLS // 10)
OUTAGES = int(os.environ.get("BABYLON_FAULT_OUTAGES", "20" if WHOLE else "1"))


class Fleet:
    """Keeps the workers alive, strikes them, and counts the strikes that hit a window in work."""

    def __init__(self, settings: Settings, store: Store, server: EmbeddedPostgres) -> None:
        self._settings, self._store, self._server = settings, store, server
        self._random, self._lives = Random(1), 0
        self._stack = ExitStack()
        self._workers: dict[int, Worker] = {}
        self.windows: list[Window] = []
        self.struck: Counter[str] = Counter()

    async def run(self) -> None:
        while len(self.windows) < WINDOWS:
            await self._play()
        due = ["kill"] * KILLS + ["halt"] * HALTS + ["outage"] * OUTAGES
        self._random.shuffle(due)
        with self._stack:
            for place in range(len(ORDERS)):
                self._start(place)
            while due or not await self._done():
                await asyncio.sleep(self._random.uniform(0.05, 0.3))
                for place, worker in self._workers.items():
                    if worker.exit_code is not None:
                        assert worker.exit_code in (0, -signal.SIGKILL), (
                            f"{worker.exit_code}: {worker.said}"
                        )
                        if worker.exit_code or not await self._done():
                            self._start(place)
                if due and await self._is_time() and await self._strike(due[-1]):
                    self.struck[due.pop()] += 1
                if due and await self._done(left=len(ORDERS)):
                    with suppress(*UNREACHABLE):
                        await self._play()  # so that the strikes that are due meet work

    async def _play(self) -> None:
        """Add a window of play."""
        first = Window(datetime(2025, 1, 1, tzinfo=UTC))
        window = self.windows[-1].next() if self.windows else first
        start = window.start.replace(tzinfo=None)
        rows = [(f"{window.id}-{number}", start, window.id) for number in range(EACH)]
        await self._store.pool.executemany(PLAY, rows)
        self.windows.append(window)

    def _start(self, place: int) -> None:
        self._lives += 1
        worker = Worker(
            self._settings,
            "tests.faults.worker:work",
            ORDERS[place],
            str(self._lives),
        )
        self._workers[place] = self._stack.enter_context(worker)

    async def _strike(self, kind: str) -> bool:
        """Return True if the strike met a worker with a window in work."""
        if kind == "outage":
            pid = int((self._server.data / "postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(self._revive)
            return True
        running = [worker.pid for worker in self._workers.values() if worker.exit_code is None]
        if not running:
            return False
        pid = self._random.choice(running)
        try:
            os.kill(pid, signal.SIGSTOP)
            in_work = await self._in_work(pid)
            if kind == "halt":
                await asyncio.sleep(1.5 * LEASE_S if in_work else 0)
            os.kill(pid, signal.SIGKILL if kind == "kill" and in_work else signal.SIGCONT)
        except ProcessLookupError:  # it ended a moment ago
            return False
        return in_work

    def _revive(self) -> None:
        deadline = time.monotonic() + 60
        while not self._server.revive():
            assert time.monotonic() < deadline, "Postgres does not come back"
            time.sleep(0.1)

    async def _in_work(self, pid: int) -> bool:
        return (
            await self._ask(
                "SELECT count(*) FROM babylon.attempts JOIN babylon.windows w USING (window_id,"
                f" epoch, owner) WHERE ended_at IS NULL AND w.owner LIKE '%:{pid}:%'"
                " AND w.lease_until > now()"
            )
            > 0
        )

    async def _is_time(self) -> bool:
        """Return True now and then, as often as windows get done: strikes meet all of them."""
        if self._random.random() > STRUCK:
            return False
        strikes = (KILLS + HALTS + OUTAGES) / WINDOWS
        return self.struck.total() < len(ORDERS) + strikes * await self._count_done()

    async def _done(self, left: int = 0) -> bool:
        return await self._count_done() >= len(self.windows) - left

    async def _count_done(self) -> int:
        states = ", ".join(f"'{state}'" for state in DONE)
        return await self._ask(f"SELECT count(*) FROM babylon.windows WHERE state IN ({states})")

    async def _ask(self, query: str) -> int:
        for _ in range(100):
            try:
                return int(await self._store.pool.fetchval(query))
            except UNREACHABLE:
                await asyncio.sleep(0.1)
        raise AssertionError("Postgres does not answer")


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[tuple[Settings, Store, EmbeddedPostgres]]:
    """A Postgres of this test's own, which it may kill."""
    start_server(tmp_path / "server")
    server = EmbeddedPostgres(tmp_path / "home")
    server.acquire()
    try:
        settings = load_settings(
            home=tmp_path / "home",
            database={"url": server.url()},
            windows={"lease_s": LEASE_S},
            evaluation={"evaluator": letters.NAME, "scenarios": 32},
        )
        async with open_store(settings, migrate=True) as store:
            yield settings, store, server
    finally:
        server.release()


async def test_no_learning_is_lost_among_struck_workers(
    own: tuple[Settings, Store, EmbeddedPostgres],
) -> None:
    settings, store, server = own
    base = save_speaking_policy(settings.home.root / "base", letters.WRONG)
    await ensure_base(store, uri=str(base), base_model="tiny")
    await store.pool.execute("INSERT INTO \"User\" (id) VALUES ('player')")
    fleet = Fleet(settings, store, server)
    async with asyncio.timeout(900 + 10 * (WINDOWS + KILLS)):
        await fleet.run()
    assert fleet.struck == {"kill": KILLS, "halt": HALTS, "outage": OUTAGES}
    await check_lineage(store, fleet.windows)


async def check_lineage(store: Store, windows: list[Window]) -> None:
    rows = await list_windows(store)
    assert {row.window_id for row in rows} == {window.id for window in windows}
    assert all(row.state in DONE and not row.leased for row in rows)

    policies = {policy.policy_version: policy for policy in await list_policies(store)}
    check_rulings(policies)
    parents = {version: policy.parent_version for version, policy in policies.items()}
    champions = [route.policy_version for route in reversed(await all_routes(store))]
    before = dict(zip(champions[1:], champions, strict=False))
    assert {version: parents[version] for version in before} == before
    assert len(champions) == len(set(champions)) > len(windows) / 3

    fates = await store.pool.fetch("SELECT trajectory_id, window_id, fate FROM babylon.learning")
    assert sorted(fate["trajectory_id"] for fate in fates) == sorted(
        f"{window.id}-{number}" for window in windows for number in range(EACH)
    )
    assert {fate["fate"] for fate in fates} == {
        "in the champion's line",
        "in a rejected candidate",
    }
    in_line = {fate["window_id"] for fate in fates if fate["fate"] == "in the champion's line"}
    assert in_line == {row.window_id for row in rows if row.state == "deployed"}
    attempts = await list_attempts(store, in_line)
    ended = [attempt.ending for attempt in attempts]
    assert None not in ended and Counter(ended)["deployed"] == len(in_line)
    print(Counter(ended), len(champions) - 1, "promoted", len(parents) - 1, "policies")


def check_rulings(policies: dict[int, Policy]) -> None:
    """The gate promoted the updates that say the right letter where their parent did not."""
    judged = [policy for policy in policies.values() if policy.verdict is not None]
    for policy in judged:
        assert policy.verdict is not None and policy.window_id and policy.parent_version is not None
        parent = policies[policy.parent_version].window_id
        said = letters.learnt_letter(parent) if parent else letters.WRONG
        right = letters.right_letter(policy.window_id)
        learnt = letters.teaches(policy.window_id) and said != right
        assert policy.verdict["promote"] == learnt, policy.verdict
        assert policy.verdict["evidence"] == f"32 worlds of {letters.NAME}"

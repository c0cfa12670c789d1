"""Gateways and engines on machines of their own: swaps, killed engines, a gateway cut off, and a
link to Postgres that is slow, delayed and reset."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median

import aiohttp
import msgspec
import pytest

from babylon.core.api_keys import engine_secret
from babylon.core.probes import Ask
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.deployment.change import ChangeRequest, TargetRoute, change_route
from babylon.deployment.checks.probing import Faulty, ProbeTarget, probe
from babylon.policies.shared_files import publish_checkpoint
from babylon.store import Store, open_store
from babylon.store.api_keys import create_key
from babylon.store.gateways import GatewayRow, live_gateways
from babylon.store.policies import ensure_base
from babylon.store.quarantine import probe_keys, quarantined
from babylon.store.routes import current_route
from tests.hosts.machines import (
    ENGINE_PORT,
    GATEWAY_PORT,
    Machine,
    copy_key,
    machines,
    start_object_store,
    start_postgres,
    start_relay,
)
from tests.silent_relay import DELAY, DELAY_S, NO_DELAY, RESET
from tests.speaking_policy import save_speaking_policy

WHOLE = os.environ.get("HOSTS") == "all"  # `make hosts`; HOSTS=small swaps ten times
pytestmark = pytest.mark.skipif("HOSTS" not in os.environ, reason="takes minutes: `make hosts`")
SWAPS, KILLS, CLIENTS = (200, 10, 24) if WHOLE else (10, 1, 4)
PAUSE_S = 10.0  # between two kills
CYCLE = 10  # swaps, in which the link is disturbed in each way
PATIENCE_S = 600.0


@dataclass
class Seen:
    """Whole answers by call id, those that broke off in the middle and said so, and all else."""

    answers: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Site:
    """Two gateways: ``east`` with its own engine, ``west`` with two engines elsewhere."""

    hosts: dict[str, Machine]
    settings: Settings
    store: Store
    key: str
    serving: dict[str, str] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"http://{self.hosts[name].address}:{GATEWAY_PORT}"

    async def stream(self, session: aiohttp.ClientSession, name: str, seen: Seen) -> None:
        body = {
            "model": "babylon",
            "messages": [{"role": "user", "content": f"{time.monotonic_ns()}"}],
            "max_tokens": 16,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.url(name)}/v1/chat/completions"
        async with session.post(url, json=body, headers=headers) as response:
            said = await response.text()
            if response.status == 200 and "[DONE]" not in said and '"error"' in said:
                seen.broken.append(f"{name}: {said[-300:]}")
                return
            if response.status != 200 or "[DONE]" not in said:
                seen.problems.append(f"{name}: {response.status} {said[-300:]}")
                return
            chunks = [line[6:] for line in said.splitlines() if line.startswith("data: {")]
            texts = [
                choice["delta"].get("content") or ""
                for chunk in chunks
                for choice in msgspec.json.decode(chunk)["choices"]
            ]
            call, letter = (
                response.headers["x-call-id"],
                chr(97 + int(response.headers["x-model-version"])),
            )
            text = "".join(texts)
            if set(text) != {letter}:
                seen.problems.append(f"{name}: {text!r} of policy {letter}")
            seen.answers[call] = text

    async def swap(self, version: int) -> float:
        """Put a policy in force; return the seconds that it took."""
        began = time.monotonic()
        route = await current_route(self.store)
        request = ChangeRequest(author="test", reason="swap", force=True, drain_s=0.0)
        target = TargetRoute(policy_version=version, new=version)
        await change_route(self.store, route, target, request, None)
        return time.monotonic() - began


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    # Not tmp_path: Postgres runs as another user, who cannot enter it.
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as directory,
        machines(Path(directory), "store", "link", "east", "west", "one", "two") as hosts,
    ):
        url = await asyncio.to_thread(start_postgres, hosts["store"])
        shared = await asyncio.to_thread(start_object_store, hosts["store"])
        for name, value in shared.items():
            monkeypatch.setenv(name, value)
        settings = load_settings(database={"url": url}, home=Path(directory) / "operator")
        async with open_store(settings, migrate=True) as store:
            await _policies(store, settings)
            key = await create_key(store, "agents", scopes=["infer"])
            site = Site(hosts, settings, store, str(key))
            relayed = await asyncio.to_thread(start_relay, hosts["link"], url)
            _start_serving(site, {"DATABASE_URL": relayed, **shared})
            await _until_ready(site)
            yield site


async def _policies(store: Store, settings: Settings) -> None:
    """Policies that say one letter each, made on the operator's machine."""
    paths = [save_speaking_policy(settings.home.models / letter, letter) for letter in "abc"]
    digests = [await asyncio.to_thread(publish_checkpoint, settings.home, str(p)) for p in paths]
    await ensure_base(store, uri=str(paths[0]), base_model="tiny", digest=digests[0])
    await store.pool.executemany(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model,"
        " digest) VALUES ($1, 0, 'full', $2, 'tiny', $3)",
        [(n, settings.home.reference(paths[n]), digests[n]) for n in (1, 2)],
    )


def _start_serving(site: Site, shared: dict[str, str]) -> None:
    for one in site.hosts.values():
        one.environment = {**shared, "BABYLON_HOME": str(one.home), "OMP_NUM_THREADS": "1"}
    listen = {
        "GATEWAY_LISTEN": f"http://0.0.0.0:{GATEWAY_PORT}",
        "LOCAL_ENDPOINT": "http://localhost:8080",
    }
    one, two = site.hosts["one"], site.hosts["two"]
    one.home.mkdir()
    engine_secret(one.home)
    copy_key(one, [two, site.hosts["west"]])
    for engine in (one, two):
        engine.babylon("engine", ENGINE_LISTEN=f"http://{engine.address}:{ENGINE_PORT}")
    urls = ",".join(f"http://{engine.address}:{ENGINE_PORT}" for engine in (one, two))
    site.hosts["west"].babylon("serve", ENGINE="remote", ENGINE_URL=urls, **listen)
    site.hosts["east"].babylon("serve", **listen)


async def _until_ready(site: Site) -> None:
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        for name in ("east", "west"):
            while True:
                try:
                    async with session.get(f"{site.url(name)}/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                assert site.hosts[name].running[-1].poll() is None, site.hosts[name].logs()
                await asyncio.sleep(0.2)
    await _until_held(site, 0)


async def _until_held(site: Site, *versions: int, by: Collection[str] = ("one", "two")) -> None:
    """Wait for engines of the west: the second may load later than the first."""
    wanted = {f"babylon-v{version}" for version in versions}
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        for name in by:
            while not wanted <= {*await _held(session, site.hosts[name])}:
                await asyncio.sleep(0.2)
    await asyncio.sleep(3.0)  # the gateway looks every two seconds


async def _held(session: aiohttp.ClientSession, engine: Machine) -> list[str]:
    try:
        async with session.get(f"http://{engine.address}:{ENGINE_PORT}/v1/models") as response:
            return [card["id"] for card in (await response.json())["data"]]
    except aiohttp.ClientError:  # it starts
        return []


async def test_gateways_and_engines_of_other_machines_serve_swap_and_survive(site: Site) -> None:
    rows = {row.url: row for row in await live_gateways(site.store)}
    assert {*rows} == {site.url("east"), site.url("west")}  # nobody announces localhost
    await _prove_who_they_are(site, [*rows.values()])
    seen, done = Seen(), asyncio.Event()
    reachable = {"east", "west"}

    async def client(number: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            while not done.is_set():
                name = ("east", "west")[number % 2]
                if name in reachable:
                    await site.stream(session, name, seen)
                else:
                    await asyncio.sleep(0.1)

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    kills: list[float] = []
    swaps: list[float] = []
    killer = asyncio.create_task(_kill_engines(site, kills))
    try:
        while len(swaps) < SWAPS or len(kills) < KILLS or len(swaps) % CYCLE:
            swaps.append(await site.swap(1 + len(swaps) % 2))
            await _disturb(site, len(swaps) % CYCLE)
            assert not killer.done(), killer.exception()
        killer.cancel()
        await asyncio.wait([killer])
        await _until_held(site, 1, 2)
        site.hosts["store"].slow_down("")
        reachable.discard("east")
        await asyncio.sleep(2.0)  # its calls end
        site.hosts["east"].cut_off()
        await site.swap(1)
        await site.swap(2)
        before = len(seen.answers)
        while len(seen.answers) < before + 3:  # the west goes on
            await asyncio.sleep(0.1)
        site.hosts["east"].rejoin()
        route = await current_route(site.store)
        async with asyncio.timeout(PATIENCE_S):
            while {row.route_version for row in await live_gateways(site.store)} != {
                route.route_version
            } or len(await live_gateways(site.store)) < 2:
                await asyncio.sleep(0.2)
        reachable.add("east")
        before = len(seen.answers)
        while len(seen.answers) < before + 5:
            await asyncio.sleep(0.1)
    finally:
        killer.cancel()
        done.set()
        await asyncio.gather(*clients)
    logs = "\n".join(one.logs() for one in site.hosts.values())
    assert seen.problems == [], f"{seen.problems}\n{logs}"
    assert await quarantined(site.store) == {}
    recorded = await _recorded(site, seen.answers)
    assert {call: recorded.get(call) for call in seen.answers} == dict.fromkeys(seen.answers, 1)
    _report(site, swaps, kills, seen)
    paths = await site.store.pool.fetch("SELECT uri FROM babylon.policies")
    assert all(row["uri"].startswith("home:") for row in paths)


async def _kill_engines(site: Site, kills: list[float]) -> None:
    """Kill the engines of the west in turn, one every ``PAUSE_S``; ``kills``: the times.

    It waits only until the engine killed before holds the policies again, because the other one is
    the only healthy replica meanwhile. On a busy machine, that takes longer than ``PAUSE_S``. To
    kill the same engine while it starts would not help: after each early death, its supervisor
    waits longer before it starts it again.
    """
    for name, other in cycle((("one", "two"), ("two", "one"))):
        await _until_held(site, 1, 2, by=[other])
        if kills:
            await asyncio.sleep(kills[-1] + PAUSE_S - time.monotonic())
        assert site.hosts[name].kill("engine_process")
        kills.append(time.monotonic())


async def _disturb(site: Site, step: int) -> None:
    """Slow the link to Postgres down, end the gateways' sessions, delay the link and reset it."""
    link, store = site.hosts["link"], site.hosts["store"]
    if step == 1:
        store.slow_down("4mbit")
    elif step == 3:
        store.slow_down("20mbit")
        await site.store.pool.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE host(client_addr) = $1",
            link.address,
        )
    elif signals := {5: DELAY, 7: RESET, 8: RESET, 9: RESET, 0: NO_DELAY}.get(step):
        assert link.kill(number=signals) == 1


def _report(site: Site, swaps: Sequence[float], kills: Sequence[float], seen: Seen) -> None:
    """Print the figures; the disturbances were real."""
    resets = [
        int(line.split()[1])
        for line in (site.hosts["link"].disk / "0.log").read_text().splitlines()
        if line.startswith("reset")
    ]
    assert len(resets) == 3 * len(swaps) // CYCLE
    assert min(resets) > 0
    delayed = [seconds for number, seconds in enumerate(swaps) if number % CYCLE in (5, 6)]
    assert min(delayed) > 2 * DELAY_S
    pauses = [late - early for early, late in pairwise(kills)] or [0.0]
    print(
        f"{len(swaps)} swaps in {median(swaps):.2f} s (delayed: {median(delayed):.2f} s; slowest:"
        f" {max(swaps):.1f} s), {len(kills)} kills of engines every {median(pauses):.1f} s (at most"
        f" {max(pauses):.1f} s), {len(resets)} resets of {sum(resets)} connections,"
        f" {len(seen.answers)} answered calls, {len(seen.broken)} broken after their first byte,"
        " 0 refused"
    )


async def _prove_who_they_are(site: Site, rows: list[GatewayRow]) -> None:
    """A probe reaches each gateway at its own address; another one cannot vouch for it."""
    keys = await probe_keys(site.store, [row.gateway_id for row in rows])
    ask = Ask(messages=[{"role": "user", "content": "hello"}], max_tokens=4, seed=0)
    target = ProbeTarget(model="babylon", policy_version=0, champion_version=0, keys=keys)
    probes = await probe(rows, [(0, ask), (1, ask)], target)
    assert not [one for one in probes if isinstance(one.champion, Faulty)], probes
    east, west = sorted(rows, key=lambda row: row.url)
    (found,) = await probe([replace(east, url=west.url)], [(0, ask)], target)
    assert isinstance(found.champion, Faulty)
    assert "another program answers" in found.champion.problem


async def _recorded(site: Site, answered: Collection[str]) -> dict[str, int]:
    """Return call id → number of records, once all that was answered is there."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            rows = await site.store.pool.fetch(
                "SELECT call_id, count(*) AS n FROM babylon.calls GROUP BY call_id"
            )
            found = {row["call_id"]: row["n"] for row in rows}
            if found.keys() >= set(answered):
                return found
            await asyncio.sleep(0.5)


async def test_a_gateway_that_starts_without_the_database_serves_the_last_route(
    site: Site,
) -> None:
    await site.swap(1)
    site.hosts["store"].kill("postgres")
    east = site.hosts["east"]
    east.kill()
    environment = {
        "GATEWAY_LISTEN": f"http://0.0.0.0:{GATEWAY_PORT}",
        "LOCAL_ENDPOINT": "http://localhost:8080",
    }
    east.babylon("serve", **environment)
    seen = Seen()
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        while not seen.answers:
            try:
                await site.stream(session, "east", seen)
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
    assert {*"".join(seen.answers.values())} == {"b"}

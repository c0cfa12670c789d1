"""Start, stop and report the services of one home."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
import psutil

from babylon.core.errors import BabylonError, ConfigError, ServingError
from babylon.core.home import Home
from babylon.core.processes import Processes, ProcessRecord
from babylon.core.settings import DatabaseSettings, Settings
from babylon.ops.up.health import TIMEOUT, is_healthy
from babylon.ops.up.in_force import (
    changed_settings,
    forget_in_force,
    note_problem,
    read_problem,
    written_at,
)
from babylon.ops.up.runs import stop_runs
from babylon.ops.up.services import UpService, services
from babylon.ops.up.supervisor import DETACHED, GUARD, NAME, Supervisor, stop_all, stop_order
from babylon.serving.ports import require_free_port
from babylon.stages.champion import ensure_champion
from babylon.store import Store, database_status, open_store
from babylon.store.server import stop_left_server
from babylon.store.windows import windows_in_work
from babylon.training.base_model import Progress

_APPLY = "`babylon up --apply` restarts the services with them"
_RESTART = "change its settings and restart it where it runs (`systemctl restart babylon`)"
_POLL_S = 0.2
STOP_S = 90.0  # all services, one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One line of ``babylon status``."""

    name: str
    running: bool
    healthy: bool
    pid: int | None = None
    ports: tuple[int, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpReport:
    """Result of ``up``.

    ``changed``: variables whose new values are not in force; ``remedy`` puts them in force.
    """

    services: list[ServiceStatus]
    changed: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkInHand:
    """A window that a worker holds, or held when it died (``lease`` is ``lost``)."""

    window_id: str
    state: str
    owner: str
    lease: Literal["held", "lost"]


Say = Callable[[str], None]


def _mute(_: str) -> None:
    """Say nothing."""


async def up(
    settings: Settings, progress: Progress | None = None, *, apply: bool = False, say: Say = _mute
) -> UpReport:
    """Migrate the database, start the supervisor unless it runs, and return when all answer.

    The first call also makes the base model or finds it; ``progress`` reports that. Services that
    run keep their settings: the report names those that changed since, and ``apply`` restarts the
    services with them. When a service fails, all that this call started are stopped.

    Raises:
        ConfigError: two services have the same port.
        ServingError: a port is taken, or a service died or did not become healthy in time.
        DatabaseError: the database is down.
    """
    processes = Processes(home=settings.home.root)
    wanted, keeper = services(settings), Supervisor(settings)
    with processes.exclusive():
        running = any(processes.running(name) for name in (NAME, GUARD))
        found = changed_settings(settings.home, keeper.variables)
        changed = (found or []) if running else []
        if changed and apply:
            _require_detached(processes)
            say("restarting the services, because settings changed (some seconds without answers)")
            await _stop(settings.home, wanted)
            running, changed = False, []
        elif not running and found != []:  # of a supervisor that was killed, with other settings
            await _stop(settings.home, wanted)
        if not running:
            await _start(keeper, processes, wanted, progress, say)
    wanted = services(settings)  # anew: the first start made the password of Prefect's server
    detached = _is_detached(record) if (record := processes.running(NAME)) else True
    return UpReport(
        services=await status(settings.home, settings.database, wanted),
        changed=tuple(changed),
        remedy=_APPLY if detached else _RESTART,
    )


def _require_detached(processes: Processes) -> None:
    """Refuse to restart a supervisor that somebody else runs, who would not run the new one.

    Raises:
        ServingError: systemd, a container or a terminal runs it.
    """
    record = processes.running(NAME)
    if record and not _is_detached(record):
        raise ServingError(
            f"the supervisor, process {record.pid}, was started with `up --foreground`: {_RESTART}"
        )


def _is_detached(supervisor: ProcessRecord) -> bool:
    try:
        return DETACHED in psutil.Process(supervisor.pid).environ()
    except psutil.Error:  # it may end meanwhile, or be another user's
        return True


def _output(home: Home, supervisor: ProcessRecord | None) -> str:
    """The place of the supervisor's output: its log, or the journal, a container or a terminal."""
    if supervisor and not _is_detached(supervisor):
        return "`up --foreground`: its output is in the journal, or where it runs"
    return str(home.logs / f"{NAME}.log")


async def _start(
    keeper: Supervisor,
    processes: Processes,
    wanted: Sequence[UpService],
    progress: Progress | None,
    say: Say,
) -> None:
    settings = keeper.settings
    # The supervisor adopts those that run.
    _require_ports([service for service in wanted if not processes.running(service.name)])
    if not settings.home.root.exists():
        say(f"first start: making the home {settings.home.root}; allow one to three minutes")
    say("database: starting and migrating it (a new one takes about ten seconds)")
    async with open_store(settings, migrate=True, game_may_be_away=True) as store:
        say("base model: loading it; the embedded one is first made, which takes up to a minute")
        await ensure_champion(
            store, settings.home, settings.model, settings.seed, progress=progress
        )
        say("services: gateway, engine, admin, Prefect and its workers (about half a minute)")
        if not any(processes.running(service.name) for service in wanted):
            # Left by a reboot. The guard would take it that they ran, and try for ever.
            forget_in_force(settings.home)
        one, before = keeper.guard(), written_at(settings.home)
        try:
            processes.start(one)
            while written_at(settings.home) in (None, before):
                if processes.running(GUARD) is None:
                    raise ServingError(
                        f"the services did not start; the end of {one.log}:\n{one.log_tail()}"
                    )
                await asyncio.sleep(_POLL_S)
        except BaseException:  # Ctrl-C too must leave nothing half-started
            other = processes.running(NAME)
            if other is None or _is_detached(other):  # else systemd was first, and ours ended
                await _stop(settings.home, wanted)
            raise


async def _stop(home: Home, services: Sequence[UpService]) -> list[str]:
    """Stop the supervisor, which stops its services, and then what may be left of them."""
    processes = Processes(home=home.root)
    forget_in_force(home)  # first: without the record the guard starts no supervisor
    note_problem(home, None)
    ran = [name for name in stop_order(services) if processes.running(name)]
    if await asyncio.to_thread(processes.stop, NAME, STOP_S):
        ran.append(NAME)
    # A supervisor that its guard has just started holds no process yet: adopted ones are not its.
    await asyncio.to_thread(processes.stop, GUARD, 1.0)
    await stop_all(processes, services)
    await asyncio.to_thread(stop_runs, home.root)  # their workers were killed
    return ran


async def down(home: Home, database: DatabaseSettings, services: Sequence[UpService]) -> list[str]:
    """Stop what ``up`` started, in reverse order. Return the names of the services that ran.

    ``postgres`` is among them if an embedded server was left that no living process uses.
    """
    processes = Processes(home=home.root)
    with processes.exclusive():
        stopped = await _stop(home, services)
        # Killed services did not stop it. A home is copied after this call, so nothing may run.
        if await stop_left_server(database, home):
            stopped.append("postgres")
        return stopped


async def status(
    home: Home, database: DatabaseSettings, services: Sequence[UpService]
) -> list[ServiceStatus]:
    """The state of the database and of each service."""
    processes = Processes(home=home.root)
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        found = [await _status(http, processes, service) for service in services]
    running, problem = processes.running(NAME), read_problem(home)
    keeper = ServiceStatus(
        name=NAME,
        running=running is not None,
        healthy=running is not None and problem is None,
        pid=running.pid if running else None,
        detail=problem or _output(home, running),
    )
    serving = any(one.running for one in found)
    return [await _database(database, home, serving), keeper, *found]


async def work_in_hand(store: Store) -> list[WorkInHand]:
    """Return who works on what. A lease that nobody renews is lost, whatever its state says."""
    return [
        WorkInHand(
            window_id=row.window_id,
            state=str(row.state),
            owner=row.owner or "",
            lease="lost" if row.lost else "held",
        )
        for row in await windows_in_work(store)
    ]


def _require_ports(services: Iterable[UpService]) -> None:
    """Check that each service has a port of its own, and that nobody holds it."""
    names: dict[int, str] = {}
    for service in services:
        for variable, port in service.ports.items():
            if port in names:
                raise ConfigError(
                    f"{names[port]} and {variable} are the same port, {port}: change one of them"
                )
            names[port] = variable
            require_free_port(port, user=service.name, variable=variable)


async def _status(
    http: aiohttp.ClientSession, processes: Processes, service: UpService
) -> ServiceStatus:
    record = processes.running(service.name)
    return ServiceStatus(
        name=service.name,
        running=record is not None,
        healthy=record is not None and await is_healthy(http, service),
        pid=record.pid if record else None,
        ports=tuple(service.ports.values()),
        detail=str(service.log),
    )


async def _database(database: DatabaseSettings, home: Home, serving: bool) -> ServiceStatus:
    """The database's state. An embedded server that is down is not started for it."""
    if database.url is None and not serving:
        return ServiceStatus(name="database", running=False, healthy=False, detail="embedded")
    try:
        found = await database_status(database, home)
    except BabylonError as error:
        return ServiceStatus(name="database", running=False, healthy=False, detail=str(error))
    return ServiceStatus(
        name="database",
        running=True,
        healthy=found.revision == found.head,
        detail=found.place,
    )

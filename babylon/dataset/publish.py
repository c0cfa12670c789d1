"""Publishing: finished windows that the ledger does not know, one atomic commit a UTC day of play.

The order makes it safe to stop anywhere: files first, then their rows in the ledger, then the
commit, then its revision. A run that died after its commit finds its files at the head by path and
digest, and only enters the revision. A take-down knows of them in between.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from babylon.core.errors import BabylonError, ConfigError, reason_of
from babylon.core.home import Home
from babylon.core.settings import PublishSettings
from babylon.core.types import Published, Scored
from babylon.dataset.build import build_tables, selection_of, windows_of
from babylon.dataset.card import write_card
from babylon.dataset.hub import Head, Hub, commit_once
from babylon.dataset.schema import SCENARIOS, SCHEMAS, TRAJECTORIES
from babylon.dataset.table_file import UNREADABLE, ids_of, local_files, read_published
from babylon.store import Store
from babylon.store.published import (
    PublishedFile,
    list_published,
    publishing,
    read_withheld,
    record_published,
)

log = logging.getLogger(__name__)
DAY = len("YYYY-MM-DD")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDay:
    """The commit of one UTC day. Without a revision it is what a run would commit."""

    day: str
    files: tuple[PublishedFile, ...]
    revision: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def written(self, home: Home) -> list[Published]:
        """Return the local files of this commit."""
        return [
            Published(
                window_id=file.window_id,
                uri=home.reference(home.datasets / file.path),
                sha256=file.sha256,
                rows=file.rows,
            )
            for file in self.files
        ]


def require_publishable(publish: PublishSettings) -> str:
    """Return the repository, if everything that publishing needs was decided.

    Raises:
        ConfigError: names the settings that are missing.
    """
    needed = {
        "PUBLISH_TO": publish.repository,
        "PUBLISH_LICENSE": publish.license,
        "PUBLISH_AGENTS": publish.agents,
    }
    if missing := [name for name, value in needed.items() if not value]:
        raise ConfigError(
            f"publishing needs {', '.join(missing)}: nothing leaves this machine before you named"
            " the repository, the license, and the agents that agreed (docs/dataset.md)"
        )
    assert publish.repository is not None
    return publish.repository


async def publish_days(
    store: Store,
    home: Home,
    publish: PublishSettings,
    *,
    day: date | None = None,
    before: date | None = None,
    dry_run: bool = False,
) -> list[PublishedDay]:
    """Publish the windows of a day, or of all days ``before`` one, that are not published yet.

    With ``before``, as the daily flow calls it, each day of play is one commit: a window of a day
    that is published already goes with the next day's. By hand it goes at once. With ``dry_run``
    the same files are made and nothing is sent.

    Raises:
        ConfigError: a setting is missing.
        PublishError: the hub refused or did not answer. Days before that are published.
    """
    repository = require_publishable(publish)
    async with nullcontext() if dry_run else publishing(store):
        return await _publish(store, home, publish, repository, day, before, dry_run)


async def _publish(
    store: Store,
    home: Home,
    publish: PublishSettings,
    repository: str,
    day: date | None,
    before: date | None,
    dry_run: bool,
) -> list[PublishedDay]:
    known = await list_published(store, repository)
    windows = await unpublished(store, known, day=day, before=before)
    done: list[PublishedDay] = []
    for name, group in _days(windows, known, wait=before is not None):
        files = await _files(store, home, publish, repository, group, known)
        if not files:
            continue
        made = PublishedDay(day=name, files=tuple(files))
        if not dry_run:
            await record_published(store, made.files)
            made = await _send(home, publish, made, known)
            await record_published(store, made.files)
            log.info("published %s: %d files, %.1f MB", name, len(files), made.bytes / 1e6)
            known = [*known, *made.files]
        done.append(made)
    return done


def _days(
    windows: Iterable[Scored], known: Iterable[PublishedFile], *, wait: bool
) -> Iterator[tuple[str, list[Scored]]]:
    """Yield each day of play with its windows.

    With ``wait`` a day that has its commit gets no second one: its late windows join the next day.
    """
    committed = {file.window_id[:DAY] for file in known}
    late: list[Scored] = []
    for name, group in groupby(windows, lambda scored: scored.claim.window_id[:DAY]):
        if wait and name in committed:
            late += group
        else:
            yield name, [*late, *group]
            late = []
    if late:
        log.info("%d windows finished late: they go with the next day's commit", len(late))


async def unpublished(
    store: Store,
    known: Iterable[PublishedFile],
    *,
    day: date | None = None,
    before: date | None = None,
) -> list[Scored]:
    """Return the finished windows of which a table is missing in the ledger, oldest first."""
    have = {(file.config, file.window_id) for file in known}
    return [
        scored
        for scored in await windows_of(store, day)
        if any((config, scored.claim.window_id) not in have for config in SCHEMAS)
        and (before is None or scored.claim.window_id[:DAY] < before.isoformat())
    ]


async def _files(
    store: Store,
    home: Home,
    publish: PublishSettings,
    repository: str,
    windows: list[Scored],
    known: Iterable[PublishedFile],
) -> list[PublishedFile]:
    """Write the windows' files, and describe those that the ledger does not have."""
    have = {(file.config, file.window_id) for file in known}
    selection = await selection_of(store, publish)
    files = []
    for scored in windows:
        try:
            tables = await build_tables(store, home, scored, selection)
        except BabylonError as error:  # a damaged window must not hold up all later ones
            log.error("window %s is not published: %s", scored.claim.window_id, error)
            continue
        files += [
            await asyncio.to_thread(describe, home, repository, config, published)
            for config, published in tables.items()
            if (config, scored.claim.window_id) not in have
        ]
    return files


def describe(home: Home, repository: str, config: str, published: Published) -> PublishedFile:
    """Return the ledger's row of a local file, without a revision."""
    path = Path(home.resolve(published.uri))
    agents: list[str] = []
    trajectories: list[str] = []
    if config == TRAJECTORIES:
        ids = ids_of(path)
        agents = [name for row in ids for name in (row["agent_id"], *(row.get("players") or ()))]
        trajectories = [row["trajectory_id"] for row in ids]
    elif config == SCENARIOS:  # it tells of plays too that were refused as rows
        ids = pq.read_table(path, columns=["players", "trajectory_ids"])
        agents, trajectories = (pc.list_flatten(ids[n]).to_pylist() for n in ids.column_names)
    return PublishedFile(
        repository=repository,
        config=config,
        window_id=published.window_id,
        path=path.relative_to(home.datasets).as_posix(),
        sha256=published.sha256,
        bytes=path.stat().st_size,
        rows=published.rows,
        agents=tuple(sorted(set(agents))),
        trajectory_ids=tuple(sorted(trajectories)),
        revision="",
    )


def describe_local(home: Home) -> tuple[list[PublishedFile], list[str]]:
    """Describe the local dataset → its files, and those that are damaged with the reason."""
    files, damaged = [], []
    for config, path in local_files(home):
        try:
            files.append(describe(home, "", config, read_published(home, path)))
        except UNREADABLE as error:  # it must not hold up the card of the others
            damaged.append(f"{path} cannot be read ({reason_of(error)}): remove it")
    return files, damaged


async def _send(
    home: Home, publish: PublishSettings, made: PublishedDay, known: Sequence[PublishedFile]
) -> PublishedDay:
    card = await asyncio.to_thread(write_card, home, [*known, *made.files], publish)

    def change(head: Head) -> tuple[dict[str, Path | bytes], list[str]]:
        """Add the files that the head lacks, and the card with them.

        A run that died after its commit may have made another file of the same window, because a
        verdict came in between: that one goes, so that no window is there twice.
        """
        add: dict[str, Path | bytes] = {
            file.path: home.datasets / file.path
            for file in made.files
            if head.files.get(file.path, "") != file.sha256
        }
        own = {stem_of(file.path): file.path for file in made.files}
        doubles = [path for path in head.files if own.get(stem_of(path), path) != path]
        return {**add, **card} if add else {}, doubles

    def send() -> str:
        hub = Hub(publish, made.files[0].repository)
        return commit_once(hub, change, f"Windows of {made.day}")

    revision = await asyncio.to_thread(send)
    files = tuple(replace(file, revision=revision) for file in made.files)
    return PublishedDay(day=made.day, files=files, revision=revision)


def stem_of(path: str) -> str:
    """Return a file's path without its digest: table, month, window and split."""
    return path[: -len("-12345678.parquet")] if path.endswith(".parquet") else path


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishingStatus:
    """The ledger in numbers, and the finished windows that wait."""

    repository: str | None
    private: bool
    license: str | None
    agents: str | None
    windows: int
    files: int
    rows: int
    bytes: int
    last_window: str | None
    last_revision: str | None
    withheld: int
    waiting: int


async def publishing_status(store: Store, publish: PublishSettings) -> PublishingStatus:
    """Return what is published, by the ledger."""
    known = await list_published(store, publish.repository or "")
    withheld = await read_withheld(store)
    last = known[-1] if known else None
    return PublishingStatus(
        repository=publish.repository,
        private=publish.private,
        license=publish.license,
        agents=publish.agents,
        windows=len({file.window_id for file in known}),
        files=len(known),
        rows=sum(file.rows for file in known),
        bytes=sum(file.bytes for file in known),
        last_window=last.window_id if last else None,
        last_revision=last.revision if last else None,
        withheld=len(withheld.agents) + len(withheld.trajectories),
        waiting=len(await unpublished(store, known)),
    )

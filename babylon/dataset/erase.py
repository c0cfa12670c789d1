"""Take-down: where an agent or a trajectory was published, who learnt from it, and its removal.

Rewriting removes the rows from the files; the old files stay in the repository's history until it
is squashed. Weights cannot be rewritten: the report names the policies that learnt from the play.
"""

import asyncio
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from babylon.core.errors import BabylonError
from babylon.core.home import Home
from babylon.core.settings import PublishSettings
from babylon.dataset.card import write_card
from babylon.dataset.hub import Head, Hub, commit_once
from babylon.dataset.publish import stem_of
from babylon.dataset.schema import SCENARIOS, TEXTS, TRAJECTORIES
from babylon.dataset.table_file import rewrite_table
from babylon.store import Store
from babylon.store.published import (
    PublishedFile,
    list_published,
    policies_of,
    publishing,
    read_withheld,
    record_published,
    withhold,
)

Kind = Literal["agent", "trajectory"]


class NothingToEraseError(BabylonError):
    """Nothing of that name was ever recorded or published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """The published files that tell of a name, the policies that learnt from it, and what to do.

    ``policies``: version → ``trained`` on it, or ``descendant`` of such a policy. ``revision`` is
    the commit without it, empty if nothing was changed on the hub.
    """

    kind: Kind
    name: str
    trajectories: int
    files: tuple[str, ...]
    policies: dict[int, str]
    revision: str = ""
    squashed: bool = False

    @property
    def advice(self) -> tuple[str, ...]:
        """The steps that are left to do, one sentence each."""
        told = []
        if self.files and not self.revision:
            told.append(f"{len(self.files)} published files hold it: add --apply to rewrite them")
        if self.files and not self.squashed:
            told.append("Old revisions keep it until the history is squashed: add --squash.")
        for version, how in self.policies.items():
            told.append(
                f"Policy {version} {'learnt from it' if how == 'trained' else 'descends from one'}:"
                " roll back to an older policy (`babylon model rollback`), delete its rows from"
                " the game's tables, then `babylon windows release` the window and train it again."
            )
        return tuple(told)


async def erase(
    store: Store,
    home: Home,
    publish: PublishSettings,
    kind: Kind,
    name: str,
    *,
    reason: str = "",
    apply: bool = False,
    squash: bool = False,
) -> Erasure:
    """Report where a name was published; with ``apply``, take it down everywhere.

    Raises:
        NothingToEraseError: the name is unknown.
        PublishError: the hub refused. The name is withheld from later files all the same.
    """
    # While a run of the daily flow commits files, the ledger does not know them yet.
    async with publishing(store) if apply else nullcontext():
        return await _erase(store, home, publish, kind, name, reason, apply, squash)


async def _erase(
    store: Store,
    home: Home,
    publish: PublishSettings,
    kind: Kind,
    name: str,
    reason: str,
    apply: bool,
    squash: bool,
) -> Erasure:
    published = await list_published(store, publish.repository or "")
    trajectories = await _trajectories(store, published, kind, name)
    withheld = await read_withheld(store)
    known = trajectories or any(name in file.agents for file in published)
    if not known and name not in withheld.agents | withheld.trajectories:
        raise NothingToEraseError(
            f"no {kind} {name!r} was recorded or published: see the names in `babylon windows show`"
        )
    windows = {
        file.window_id
        for file in published
        if not trajectories.isdisjoint(file.trajectory_ids)
        or (kind == "agent" and name in file.agents)
    }
    held = [
        file
        for file in published
        if file.window_id in windows and file.config in (TRAJECTORIES, SCENARIOS)
    ]
    found = Erasure(
        kind=kind,
        name=name,
        trajectories=len(trajectories),
        files=tuple(file.path for file in held),
        policies=await policies_of(store, sorted(trajectories)),
    )
    if not apply:
        return found
    # Before anything else: no later file may hold it, also if the hub refuses the rest.
    await withhold(store, kind, name, reason)
    if held:
        agents = {name} if kind == "agent" else set()
        others = [file for file in published if file not in held]
        rewritten, revision = await asyncio.to_thread(
            _rewrite, home, publish, held, others, agents, trajectories
        )
        await record_published(store, rewritten)
        found = replace(found, revision=revision)
    # Also when nothing is held any more: an earlier take-down may have left the history.
    if squash := squash and bool(published):
        await asyncio.to_thread(Hub(publish, published[0].repository).squash)
    return replace(found, squashed=squash)


async def _trajectories(
    store: Store, published: list[PublishedFile], kind: Kind, name: str
) -> set[str]:
    """Return the trajectories: of the game's rows, and of files whose rows were removed since."""
    if kind == "trajectory":
        known = await store.game.fetchval(
            'SELECT EXISTS (SELECT FROM trajectories WHERE "trajectoryId" = $1)', name
        )
        return {name} if known or any(name in file.trajectory_ids for file in published) else set()
    rows = await store.game.fetch(
        'SELECT "trajectoryId" AS id FROM trajectories WHERE "agentId" = $1', name
    )
    ids = {row["id"] for row in rows}
    for file in published:
        if name in file.agents:
            ids |= await asyncio.to_thread(_ids_in_file, store.home, file, name)
    return ids


def _ids_in_file(home: Home, file: PublishedFile, agent: str) -> set[str]:
    path = home.datasets / file.path
    if not path.exists():
        return set()
    rows = pq.read_table(path, columns=["agent_id", "trajectory_id"])
    return set(rows.filter(pc.equal(rows["agent_id"], agent))["trajectory_id"].to_pylist())


def _rewrite(
    home: Home,
    publish: PublishSettings,
    held: list[PublishedFile],
    others: list[PublishedFile],
    agents: set[str],
    trajectories: set[str],
) -> tuple[list[PublishedFile], str]:
    """Commit the files without the rows in place of the old ones → (ledger's rows, revision)."""
    # Local files go last: until the commit is made, they can be rewritten again.
    hub = Hub(publish, held[0].repository)
    there = hub.create()
    temporary = Path(mkdtemp(prefix="babylon-erase-"))
    try:
        made = [
            _rewritten(hub, there, home, temporary, file, agents, trajectories) for file in held
        ]
        card = write_card(home, [*others, *made], publish)

        def change(head: Head) -> tuple[dict[str, Path | bytes], list[str]]:
            """Add the new files that the head lacks, and delete every other file of the windows."""
            new = {stem_of(file.path): file.path for file in made}
            add: dict[str, Path | bytes] = {
                path: home.datasets / path for path in new.values() if path not in head.files
            }
            old = [path for path in head.files if new.get(stem_of(path), path) != path]
            return {**add, **card} if add or old else {}, old

        revision = commit_once(hub, change, "Take-down")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old, new in zip(held, made, strict=True):
        if old.path != new.path:
            (home.datasets / old.path).unlink(missing_ok=True)
    return [replace(file, revision=revision) for file in made], revision


def _rewritten(
    hub: Hub,
    there: Head,
    home: Home,
    temporary: Path,
    file: PublishedFile,
    agents: set[str],
    trajectories: set[str],
) -> PublishedFile:
    source = home.datasets / file.path
    if not source.exists():
        # A squash removed older revisions; a run that died after its commit removed the file.
        revision = there.revision if file.path in there.files else file.revision
        source = hub.download(file.path, revision, temporary)
    target = temporary / "rewritten.parquet"
    sha256, rows = rewrite_table(source, target, partial(_kept, file.config, agents, trajectories))
    path = f"{stem_of(file.path)}-{sha256[:8]}.parquet"
    final = home.datasets / path
    final.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(target, final)
    return replace(
        file,
        path=path,
        sha256=sha256,
        bytes=final.stat().st_size,
        rows=rows,
        agents=tuple(agent for agent in file.agents if agent not in agents),
        trajectory_ids=tuple(one for one in file.trajectory_ids if one not in trajectories),
    )


def _kept(config: str, agents: set[str], trajectories: set[str], table: pa.Table) -> pa.Table:
    """Return the rows that stay. A market that the agent shared with others is left out too."""
    if config == TRAJECTORIES:
        gone, named = (pa.array(sorted(names), pa.string()) for names in (trajectories, agents))
        by_id = pc.is_in(table["trajectory_id"], gone)
        return table.filter(pc.invert(pc.or_(by_id, pc.is_in(table["agent_id"], named))))
    shared = [not agents.isdisjoint(players) for players in table["players"].to_pylist()]
    table = table.filter(pc.invert(pa.array(shared, pa.bool_())))
    index = table.schema.get_field_index("trajectory_ids")
    plays = table["trajectory_ids"].to_pylist()
    left = [[one for one in ids if one not in trajectories] for ids in plays]
    return table.set_column(index, table.schema.field(index), pa.array(left, TEXTS))

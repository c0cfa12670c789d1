"""Take-down: where an agent or a trajectory was published, who learnt from it, and its removal.

Rewriting removes the rows from the files; the old files stay in the repository's history until it
is squashed. Weights cannot be rewritten: the report names the policies that learnt from the play.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from babylon.core.artifacts import iter_artifact
from babylon.core.errors import ArtifactError, BabylonError, reason_of
from babylon.core.home import Home
from babylon.core.settings import PublishSettings
from babylon.core.types import Artifact, Published
from babylon.dataset.card import README, write_card
from babylon.dataset.hub import Head, Hub, commit_once
from babylon.dataset.publish import describe, describe_local, stem_of
from babylon.dataset.schema import SCENARIOS, TRAJECTORIES
from babylon.dataset.table_file import UNREADABLE, ids_of, is_whole, rewrite_table
from babylon.store import Store
from babylon.store.published import (
    PublishedFile,
    forget_begun,
    list_published,
    other_repositories,
    policies_of,
    publishing,
    read_withheld,
    record_published,
    wait_for_writers,
    was_trained,
    withhold,
    withhold_plays,
)
from babylon.store.published_policies import models_with
from babylon.store.scores import windows_of_play
from babylon.store.windows import list_windows

log = logging.getLogger(__name__)
Kind = Literal["agent", "trajectory"]
Seats = set[tuple[str, str]]
"""Scenarios and the agents that played in them."""
Plays = dict[str, tuple[str, float]]
"""Trajectory → its agent and profit in US dollars."""
Keep = Callable[[pa.Table], pa.Table]


class NothingToEraseError(BabylonError):
    """Nothing of that name was ever recorded or published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """The files that tell of a name, the policies that learnt from it, and what to do.

    ``files`` are published in ``PUBLISH_TO``; ``unpublished`` are files of this home that it lacks.
    ``elsewhere``: other repositories that hold it, from a time when ``PUBLISH_TO`` named them.
    ``damaged``: files of this home that could not be read or rewritten, with the reason.
    ``policies``: version → ``trained`` on it, ``released`` since, or ``descendant`` of such a
    policy. ``models``: those that were published, as ``repository@tag``. ``applied``: they are
    rewritten. ``revision``: the commit without it, empty if nothing was changed on the hub.
    """

    kind: Kind
    name: str
    trajectories: int
    files: tuple[str, ...]
    policies: dict[int, str]
    models: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    applied: bool = False
    revision: str = ""
    squashed: bool = False

    @property
    def advice(self) -> tuple[str, ...]:
        """The steps that are left to do, one sentence each."""
        told = []
        if (holding := len(self.files) + len(self.unpublished)) and not self.applied:
            told.append(f"{holding} files hold it: add --apply to rewrite them")
        if self.files and not self.squashed:
            told.append("Old revisions keep it until the history is squashed: add --squash.")
        for file in self.damaged:
            told.append(f"{file} and may hold it: remove it, then `babylon dataset build`.")
        for repository in self.elsewhere:
            told.append(f"{repository} holds it too: run this again with PUBLISH_TO={repository}.")
        for version, how in self.policies.items():
            if how == "released":
                told.append(
                    f"Policy {version} learnt from it, was released and never serves again."
                )
                continue
            told.append(
                f"Policy {version} {'learnt from it' if how == 'trained' else 'descends from one'}:"
                " roll back to an older policy (`babylon deploy rollback`), delete its rows from"
                " the game's tables, then `babylon windows release` the window and train it again."
            )
        for model in self.models:
            told.append(
                f"{model} is published: after the rollback publish a policy that did not learn from"
                " it, then delete this tag and squash the repository's history on the hub."
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
    if apply:  # at once: a run that publishes may hold the lock for an hour
        await _withhold_known(store, publish, kind, name, reason)
    # While a run of the daily flow commits files, the ledger does not know them yet.
    async with publishing(store) if apply else nullcontext():
        return await _erase(store, home, publish, kind, name, reason, apply, squash)


async def _withhold_known(
    store: Store, publish: PublishSettings, kind: Kind, name: str, reason: str
) -> None:
    """Keep the name out of later files, also if the hub is down or a file cannot be read."""
    published = await list_published(store, publish.repository or "", for_take_down=True)
    recorded = await _recorded(store, kind, name)
    if await _is_known(store, publish, published, kind, name, recorded):
        await withhold(store, kind, name, reason)
        await withhold_plays(store, sorted(recorded), reason)


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
    published = await list_published(store, publish.repository or "", for_take_down=True)
    withheld = await read_withheld(store)
    agents = {name} if kind == "agent" else set()
    recorded = await _recorded(store, kind, name)
    known = name in withheld.agents | withheld.trajectories
    known = known or await _is_known(store, publish, published, kind, name, recorded)
    trajectories = recorded | ({name} if known and kind == "trajectory" else set())
    trajectories |= await asyncio.to_thread(_in_files, home, publish, published, kind, name)
    if not known and not trajectories:
        raise NothingToEraseError(
            f"no {kind} {name!r} was recorded or published: `babylon windows explain ID` has names"
        )
    if apply:
        await withhold(store, kind, name, reason)  # a name that only a file tells
        await withhold_plays(store, sorted(trajectories), reason)
        await wait_for_writers(store)  # of files that may still hold it
    elsewhere = await other_repositories(
        store, publish.repository or "", [*agents], [*trajectories, *({name} - agents)]
    )
    # An agent is found by its name, also among the players of a market.
    windows, seats = set[str](), Seats()
    if kind == "trajectory":
        windows, seats = await _seats(store, home, name)
    held = _held(published, agents, trajectories, windows, {agent for _, agent in seats})
    policies = await policies_of(store, sorted(trajectories))
    paths = {file.path for file in published if file.revision}
    unpublished, damaged = await asyncio.to_thread(
        _unpublished, home, paths, agents, trajectories, seats
    )
    models = await models_with(store, sorted(policies))
    found = Erasure(
        kind=kind,
        name=name,
        trajectories=len(trajectories),
        files=tuple(file.path for file in held),
        policies=policies,
        models=tuple(f"{repository}@policy-{version}" for repository, version in models),
        unpublished=tuple(path for path, _ in unpublished),
        elsewhere=tuple(elsewhere),
        damaged=tuple(damaged),
    )
    if not apply:
        return found
    damaged += await asyncio.to_thread(_rewrite_unpublished, home, publish, unpublished)
    found = replace(found, applied=True, damaged=tuple(damaged))
    others = [file for file in published if file.revision and file not in held]
    begun, held = held, await asyncio.to_thread(_committed, publish, held)
    stems = {stem_of(file.path) for file in held}  # of those, the rewritten files take the rows
    never = [file for file in begun if stem_of(file.path) not in stems]
    await forget_begun(store, never)
    if held:
        rewritten, revision = await asyncio.to_thread(
            _rewrite,
            *(home, publish, held, others),
            # with the names of earlier take-downs: one that died may have left its files behind
            agents | withheld.agents,
            trajectories | withheld.trajectories,
            seats,
        )
        await record_published(store, rewritten)
        found = replace(found, revision=revision)
    # Also when nothing is held any more: an earlier take-down may have left the history.
    if squash := squash and bool(published):
        await asyncio.to_thread(Hub(publish, published[0].repository).squash)
    return replace(found, squashed=squash)


async def _recorded(store: Store, kind: Kind, name: str) -> set[str]:
    """Return the trajectories of the game's rows."""
    column = "agentId" if kind == "agent" else "trajectoryId"
    rows = await store.game.fetch(
        f'SELECT "trajectoryId" AS id FROM trajectories WHERE "{column}" = $1', name
    )
    return {row["id"] for row in rows}


async def _seats(store: Store, home: Home, trajectory_id: str) -> tuple[set[str], Seats]:
    """Return the windows of the play and its seats: of the game's row, else of the artifacts.

    A secret may have kept its own row out of the files, but not those of others that saw it.
    """
    windows = await windows_of_play(store, trajectory_id)
    rows = await store.game.fetch(
        'SELECT "scenarioId" AS scenario_id, "agentId" AS agent_id FROM trajectories'
        ' WHERE "trajectoryId" = $1 AND "scenarioId" IS NOT NULL',
        trajectory_id,
    )
    if rows:
        return windows, {(row["scenario_id"], row["agent_id"]) for row in rows}
    seats = Seats()
    for window in await list_windows(store):
        scored = window.scored if window.window_id in windows else None
        for part in filter(None, (scored.artifact, scored.held_out) if scored else ()):
            try:
                seats |= await asyncio.to_thread(_seats_in, home, part, trajectory_id)
            except ArtifactError as error:  # files that hold its own row tell its seat
                log.warning("who shared a market with %s is not known: %s", trajectory_id, error)
    return windows, seats


def _seats_in(home: Home, artifact: Artifact, trajectory_id: str) -> Seats:
    columns = ("trajectory_id", "scenario_id", "agent_id")
    return {
        (scenario, agent)
        for frame in iter_artifact(home, artifact, columns)
        for one, scenario, agent in frame.select(columns).iter_rows()
        if one == trajectory_id
    }


def _held(
    published: list[PublishedFile],
    agents: set[str],
    trajectories: set[str],
    windows: set[str],
    seated: set[str],
) -> list[PublishedFile]:
    """Return the published files of the windows that tell of the names, or saw those seated."""
    windows = {
        file.window_id
        for file in published
        if not (trajectories.isdisjoint(file.trajectory_ids) and agents.isdisjoint(file.agents))
        or (file.window_id in windows and not seated.isdisjoint(file.agents))
    }
    return [
        file
        for file in published
        if file.window_id in windows and file.config in (TRAJECTORIES, SCENARIOS)
    ]


async def _is_known(
    store: Store,
    publish: PublishSettings,
    published: list[PublishedFile],
    kind: Kind,
    name: str,
    recorded: set[str],
) -> bool:
    """Return True if the game's rows, the ledger or a policy tell of the name. No file is read."""
    if recorded or any(name in (*file.agents, *file.trajectory_ids) for file in published):
        return True
    if kind == "trajectory" and (
        await was_trained(store, name) or await windows_of_play(store, name)
    ):
        return True
    names = ([name], []) if kind == "agent" else ([], [name])
    return bool(await other_repositories(store, publish.repository or "", *names))


def _in_files(
    home: Home, publish: PublishSettings, published: list[PublishedFile], kind: Kind, name: str
) -> set[str]:
    """Return the name's trajectories in the files of this home, and an agent's in published ones.

    Of published files, those that are not whole here are fetched.
    """
    ids: set[str] = set()
    for path in (home.datasets / TRAJECTORIES).glob("*/*.parquet"):
        try:
            ids |= _own_ids(path, f"{kind}_id", name)
        except UNREADABLE as error:  # it must not hold up the take-down from the others
            log.warning("%s", _unread(home, path, error))
    if kind == "trajectory":  # the ledger lists them
        return ids
    named = [file for file in published if file.config == TRAJECTORIES and name in file.agents]
    with TemporaryDirectory(prefix="babylon-erase-") as directory:
        hub: Hub | None = None
        there: Head | None = None  # one look at the head: its tree has all files of all months
        for file in named:
            path = home.datasets / file.path
            if not is_whole(path):
                if not file.revision:
                    continue
                if hub is None:
                    there = (hub := Hub(publish, file.repository)).head()
                path = _fetched(hub, there, file, Path(directory))
            ids |= _own_ids(path, "agent_id", name)
    return ids


def _own_ids(path: Path, column: str, name: str) -> set[str]:
    rows = pq.read_table(path, columns=["agent_id", "trajectory_id"])
    return set(rows.filter(pc.equal(rows[column], name))["trajectory_id"].to_pylist())


def _unread(home: Home, path: Path, error: Exception) -> str:
    return f"{path.relative_to(home.datasets).as_posix()} cannot be read ({reason_of(error)})"


def _committed(publish: PublishSettings, files: list[PublishedFile]) -> list[PublishedFile]:
    """Return the files that are in the repository. A run that died did not enter its commit."""
    if all(file.revision for file in files):
        return files
    head = Hub(publish, files[0].repository).head()
    if head is None:
        return [file for file in files if file.revision]
    there = {stem_of(path): path for path in head.files}
    return [
        file
        if file.revision
        else replace(file, path=there[stem_of(file.path)], revision=head.revision)
        for file in files
        if file.revision or stem_of(file.path) in there
    ]


def _fetched(hub: Hub, there: Head | None, file: PublishedFile, directory: Path) -> Path:
    """Download a published file: from the head, because a squash removed older revisions."""
    at_head = there is not None and file.path in there.files
    revision = there.revision if there is not None and at_head else file.revision
    return hub.download(file.path, revision, directory)


def _rewrite(
    home: Home,
    publish: PublishSettings,
    held: list[PublishedFile],
    others: list[PublishedFile],
    agents: set[str],
    trajectories: set[str],
    seats: Seats,
) -> tuple[list[PublishedFile], str]:
    """Commit the files without the rows in place of the old ones → (ledger's rows, revision)."""
    # Local files go last: until the commit is made, they can be rewritten again.
    hub = Hub(publish, held[0].repository)
    there = hub.create()
    # Plays first: the profits of a scenario are those of the plays that stay.
    held = sorted(held, key=lambda file: file.config != TRAJECTORIES)
    temporary = Path(mkdtemp(prefix="babylon-erase-"))
    gone, plays = set(trajectories), Plays()
    try:
        made = []
        for file in held:
            source = home.datasets / file.path
            if not is_whole(source):  # another machine made it, or a run that died after its commit
                source = _fetched(hub, there, file, temporary)
            if file.config == TRAJECTORIES:
                gone |= _going(source, agents, gone, seats)
            compared = _scenarios(source, gone) if file.config == TRAJECTORIES else set()
            keep = partial(_kept, file.config, agents, gone, plays, compared)
            made.append(_rewritten(home, temporary, source, file, keep))
            if file.config == TRAJECTORIES:
                plays |= _plays(home.datasets / made[-1].path)
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
    for new in made:  # the old file, and one that was built here since
        final = home.datasets / new.path
        for other in final.parent.glob("*.parquet"):
            if other != final and stem_of(other.name) == stem_of(final.name):
                other.unlink()
    return [replace(file, revision=revision) for file in made], revision


def _unpublished(
    home: Home, published: set[str], agents: set[str], trajectories: set[str], seats: Seats
) -> tuple[list[tuple[str, Keep]], list[str]]:
    """Return the files of this home that tell of the names and that no repository has.

    Exports and replays read them. With each file comes the function that leaves the names out, and
    with all of them the files that cannot be read.
    """
    found, damaged = list[tuple[str, Keep]](), list[str]()
    gone, plays = set(trajectories), Plays()
    for config in (TRAJECTORIES, SCENARIOS):  # plays first, as for published files
        for source in sorted((home.datasets / config).glob("*/*.parquet")):
            path, compared = source.relative_to(home.datasets).as_posix(), set[str]()
            if path in published:
                continue
            try:
                if config == TRAJECTORIES:
                    own = _going(source, agents, gone, seats)
                    gone |= own
                    compared = _scenarios(source, gone)
                    plays |= {one: play for one, play in _plays(source).items() if one not in own}
                else:
                    rows = pq.read_table(source, columns=["players", "trajectory_ids"])
                    named = {n for column in rows.columns for ns in column.to_pylist() for n in ns}
                    own = named & (agents | gone)
            except UNREADABLE as error:
                damaged.append(_unread(home, source, error))
                continue
            if own:
                found.append((path, partial(_kept, config, agents, gone, plays, compared)))
    return found, damaged


def _rewrite_unpublished(
    home: Home, publish: PublishSettings, files: list[tuple[str, Keep]]
) -> list[str]:
    """Rewrite the files in this home, and their card → those that could not be."""
    datasets, damaged = home.datasets, list[str]()
    for path, keep in files:
        source = datasets / path
        target = source.with_name(f".{source.name}.tmp")
        try:
            sha256, _ = rewrite_table(source, target, keep)
            target.replace(datasets / f"{stem_of(path)}-{sha256[:8]}.parquet")
            source.unlink()
        except UNREADABLE as error:  # it must not hold up the other files
            damaged.append(f"{path} was not rewritten ({reason_of(error)})")
        finally:
            target.unlink(missing_ok=True)
    if files and (datasets / README).exists():  # `load_dataset` fails on a split without rows
        write_card(home, describe_local(home)[0], publish)
    return damaged


def _rewritten(
    home: Home, temporary: Path, source: Path, file: PublishedFile, keep: Keep
) -> PublishedFile:
    target = temporary / "rewritten.parquet"
    sha256, rows = rewrite_table(source, target, keep)
    final = home.datasets / f"{stem_of(file.path)}-{sha256[:8]}.parquet"
    final.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(target, final)
    made = Published(window_id=file.window_id, uri=home.reference(final), sha256=sha256, rows=rows)
    return describe(home, file.repository, file.config, made)  # by the rows that are left


def _going(path: Path, agents: set[str], trajectories: set[str], seats: Seats) -> set[str]:
    """Return the plays of a file that go: the names' own, and those that saw what they wrote."""
    rows = ids_of(path)
    own = [row for row in rows if row["trajectory_id"] in trajectories or row["agent_id"] in agents]
    seats = seats | {(row["scenario_id"], row["agent_id"]) for row in own}
    saw = [
        row
        for row in rows
        for one in row.get("players") or ()
        if one in agents or (row["scenario_id"], one) in seats
    ]
    return {row["trajectory_id"] for row in [*own, *saw]}


def _scenarios(path: Path, trajectories: set[str]) -> set[str]:
    """Return the scenarios of these plays, as far as the file holds them."""
    return {row["scenario_id"] for row in ids_of(path) if row["trajectory_id"] in trajectories}


def _plays(path: Path) -> Plays:
    columns = ["trajectory_id", "agent_id", "pnl_usd"]
    rows = pq.read_table(path, columns=columns).to_pylist()
    return {row["trajectory_id"]: (row["agent_id"], row["pnl_usd"]) for row in rows}


def _kept(
    config: str,
    agents: set[str],
    trajectories: set[str],
    plays: Plays,
    compared: set[str],
    table: pa.Table,
) -> pa.Table:
    """Return the rows that stay.

    ``compared``: scenarios that lose a play. A judge compares the plays of a scenario, so the rows
    that stay there lose its reasons.
    """
    if config == TRAJECTORIES:
        ids = pa.array(sorted(trajectories), pa.string())
        table = table.filter(pc.invert(pc.is_in(table["trajectory_id"], ids)))
        both = table.select(["scenario_id", "score_reasons"]).to_pylist()
        kept = [[] if row["scenario_id"] in compared else row["score_reasons"] for row in both]
        return _with_columns(table, {"score_reasons": kept})
    # a scenario that shows what goes leaves with it; others lose a name and its share of the means
    rows = table.select(["players", "trajectory_ids", "prices"]).to_pylist()
    table = table.filter(pa.array([_stays(row, agents, trajectories) for row in rows], pa.bool_()))
    listed = table["trajectory_ids"].to_pylist()
    left = [[one for one in ids if one not in trajectories] for ids in listed]
    changed = [len(ids) != len(old) for ids, old in zip(left, listed, strict=True)]
    profits = [_profits([plays.get(one) for one in ids]) for ids in left]
    values = {"trajectory_ids": left} | {
        name: [
            new[name] if fresh else old
            for fresh, new, old in zip(changed, profits, table[name].to_pylist(), strict=True)
        ]
        for name in ("agents", "mean_pnl_usd", "best_pnl_usd")
    }
    return _with_columns(table, values)


def _stays(row: Mapping[str, Any], agents: set[str], trajectories: set[str]) -> bool:
    """Return False for a scenario that shows more of what goes than the name of a play.

    A market that was shared tells of all its players, one of the live game (``seen``) of the
    balance and prices of all its plays. What is left without a play is not built either.
    """
    left = [one for one in row["trajectory_ids"] if one not in trajectories]
    if row["players"] and not agents.isdisjoint(row["players"]):
        return False
    if len(left) == len(row["trajectory_ids"]):
        return True
    return bool(left) and not row["players"] and row["prices"] not in ("seen", "interpolated")


def _with_columns(table: pa.Table, values: Mapping[str, Sequence[object]]) -> pa.Table:
    """Return the table with these values in place of its own."""
    for name, column in values.items():
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        table = table.set_column(index, field, pa.array(column, field.type))
    return table


def _profits(plays: Sequence[tuple[str, float] | None]) -> dict[str, float | None]:
    """Return the figures of a scenario's plays; null if one of them was never published."""
    known = [play for play in plays if play is not None]
    if not known or len(known) < len(plays):
        return {"agents": None if plays else 0, "mean_pnl_usd": None, "best_pnl_usd": None}
    pnl = [profit for _, profit in known]
    return {
        "agents": len({agent for agent, _ in known}),
        "mean_pnl_usd": fmean(pnl),
        "best_pnl_usd": max(pnl),
    }

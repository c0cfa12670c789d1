"""``babylon backup``: database and files of a running system, at one consistent point.

The order gives the consistency. Calls on their way to Postgres are copied first: a call is then in
that copy, or already in the database. The database follows, in one snapshot. Files come last: a
file is written before the row that names it, never changes, and retention waits for the backup, so
every file that the snapshot names is there. Those that only the object store holds come from it.
Files of later rows may come along and do no harm.
"""

import asyncio
import logging
import os
import shutil
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import mkdtemp

import msgspec

import babylon
from babylon.core.errors import StorageError
from babylon.core.home import make_directory
from babylon.ops.backup.files import (
    IMMUTABLE,
    RECORDING,
    SINGLE,
    copy_files,
    copy_stored_files,
    sha256,
)
from babylon.ops.backup.tables import TableRows, write_tables
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.store.backup_lock import backup_lock
from babylon.store.connection import Store
from babylon.store.migrate import current_revision
from babylon.store.policies import Policy, list_policies

log = logging.getLogger(__name__)
FORMAT = 1
MANIFEST, TABLES, FILES = "backup.json", "tables", "home"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a backup.

    ``ours``: the game's tables are in it, because the database was ours. ``files``: path in the
    backup → SHA-256. ``outside``: directory of a model outside the home → its digest; such a model
    is not copied. ``problems``: policies whose files were damaged before.
    """

    format: int
    version: str
    revision: str
    ours: bool
    postgres: str
    taken_at: datetime
    tables: list[TableRows]
    files: dict[str, str]
    outside: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


async def back_up(store: Store, target: Path) -> Manifest:
    """Write a backup to the directory ``target``, which appears complete or not at all.

    Raises:
        StorageError: ``target`` exists, or lies in the home.
    """
    target = target.absolute()
    if target.is_relative_to(store.home.root):
        raise StorageError(f"{target} lies in the home that is backed up: name another directory")
    if target.exists():
        raise StorageError(f"{target} exists: a backup never overwrites, name another directory")
    make_directory(target.parent)
    temporary = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        async with backup_lock(store):
            manifest = await _write(store, temporary)
        (temporary / MANIFEST).write_bytes(
            msgspec.json.format(msgspec.json.encode(asdict(manifest)))
        )
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for problem in manifest.problems:
        log.warning("%s", problem)
    return manifest


async def _write(store: Store, target: Path) -> Manifest:
    files, root = target / FILES, store.home.root
    digests = await asyncio.to_thread(copy_files, root, files, [RECORDING, *SINGLE])
    policies = [one for one in await list_policies(store) if one.removed_at is None]
    async with (
        store.pool.acquire() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await connection.execute("SET LOCAL datestyle = 'ISO'; SET LOCAL statement_timeout = 0")
        revision = await current_revision(connection)
        assert revision is not None  # the store is open
        # GAME_DATABASE_URL does not count: restore compares this database with the new one.
        ours = await connection.fetchval("SELECT ours FROM babylon.database")
        tables = await write_tables(connection, target / TABLES, with_game=ours)
        row = await connection.fetchrow(
            "SELECT now() AS now, current_setting('server_version') AS v"
        )
    digests |= await asyncio.to_thread(copy_files, root, files, IMMUTABLE)
    digests |= await asyncio.to_thread(copy_stored_files, store.home, files, digests)
    outside, problems = await asyncio.to_thread(_checked, policies, root, files)
    assert row is not None
    return Manifest(
        format=FORMAT,
        version=babylon.__version__,
        revision=revision,
        ours=ours,
        postgres=row["v"],
        taken_at=row["now"],
        tables=tables,
        files={f"{FILES}/{name}": digest for name, digest in digests.items()}
        | await asyncio.to_thread(_digests, target / TABLES),
        outside=outside,
        problems=problems,
    )


def _checked(policies: list[Policy], root: Path, copies: Path) -> tuple[dict[str, str], list[str]]:
    """Return the models outside the home with their digests, and what is damaged."""
    outside, problems = {}, []
    for policy in policies:
        path = Path(policy.uri)
        if not path.is_absolute():  # a model of the Hugging Face hub
            continue
        inside = path.is_relative_to(root)
        found = checkpoint_digest(str(copies / path.relative_to(root) if inside else path))
        if found is None or policy.digest not in (None, found):
            state = "is missing" if found is None else "was changed after its commit"
            problems.append(f"policy {policy.policy_version}: {policy.uri} {state}")
        elif not inside:
            outside[policy.uri] = found
    return outside, problems


def _digests(directory: Path) -> dict[str, str]:
    return {f"{TABLES}/{path.name}": sha256(path) for path in sorted(directory.iterdir())}


def summary(manifest: Manifest) -> dict[str, object]:
    """Return what an operator reads."""
    return {
        "taken_at": manifest.taken_at.isoformat(),
        "revision": manifest.revision,
        "postgres": manifest.postgres,
        "game_tables": manifest.ours,
        "rows": sum(table.rows for table in manifest.tables),
        "files": len(manifest.files),
        "outside": manifest.outside,
        "problems": manifest.problems,
    }

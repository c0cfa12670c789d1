"""``babylon restore``: a backup into an empty home and an empty database.

Everything is checked before anything is written. The object store is filled first, because it alone
may be filled again by a second try. The database is filled in one transaction, and the files take
their final names after it.
"""

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from babylon.core.errors import DatabaseError, StorageError
from babylon.core.home import Home, make_home
from babylon.core.settings import DatabaseSettings
from babylon.ops.backup.backup import FILES, FORMAT, MANIFEST, TABLES, Manifest
from babylon.ops.backup.files import IMMUTABLE, RECORDING, SINGLE, check_files, publish_files
from babylon.ops.backup.tables import filled, read_tables
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.store.address import Address, parse_url
from babylon.store.game_tables import GAME_TABLES
from babylon.store.migrate import check_not_newer, current_revision, migrate
from babylon.store.server import database_url
from babylon.store.session import first_session


async def restore(database: DatabaseSettings, home: Home, source: Path) -> Manifest:
    """Restore a backup. The home keeps its own ``babylon.toml`` and key, if it has them.

    Raises:
        StorageError: the backup is damaged, lacks a model, or the home has data.
        DatabaseError: the backup is of a newer schema, or the database is not empty.
    """
    manifest = await asyncio.to_thread(_read, source)
    await asyncio.to_thread(check_files, source, manifest.files)
    await asyncio.to_thread(_check_outside, manifest)
    _check_home(home)
    async with database_url(database, home) as url:
        address = parse_url(url)
        await _check_database(address, manifest)
        make_home(home.root)
        temporary = Path(mkdtemp(dir=home.root, prefix=".restore-"))
        try:
            if (source / FILES).is_dir():
                await asyncio.to_thread(
                    shutil.copytree, source / FILES, temporary, dirs_exist_ok=True
                )
            # Before the rows: the same command can then be run again. It skips what was sent.
            await asyncio.to_thread(publish_files, replace(home, root=temporary))
            await migrate(address, manifest.revision)
            await _fill(address, source / TABLES, manifest)
            await asyncio.to_thread(_put_in_place, temporary, home.root)
        finally:
            await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
        await migrate(address)
    return manifest


def _read(source: Path) -> Manifest:
    path = source / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise StorageError(
            f"{source} is no backup ({error.strerror}: {path}): name a directory that"
            " `babylon backup` wrote"
        ) from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StorageError(f"the backup is damaged: {path}: {error}: use another one") from error
    if manifest.format != FORMAT:
        raise StorageError(
            f"{path} has format {manifest.format}, this program reads format {FORMAT}: use the"
            f" babylon-rl that wrote it, {manifest.version}"
        )
    check_not_newer(manifest.revision)
    return manifest


def _check_outside(manifest: Manifest) -> None:
    for directory, digest in manifest.outside.items():
        found = checkpoint_digest(directory)
        if found != digest:
            state = "is missing here" if found is None else f"has digest {found[:12]}… here"
            raise StorageError(
                f"the policies descend from a model outside the home, and {directory} {state}:"
                f" copy the one with digest {digest[:12]}… there first"
            )


def _check_home(home: Home) -> None:
    for name in (*IMMUTABLE, RECORDING):
        path = home.root / name
        if path.is_dir():
            found = f"{name}/" if any(path.iterdir()) else ""
        else:  # a file, or a link that leads nowhere
            found = f"a file {name}" if os.path.lexists(path) else ""
        if found:
            raise StorageError(
                f"{home.root} is not empty, it has {found}: restore into a new BABYLON_HOME"
            )


def _put_in_place(source: Path, root: Path) -> None:
    """Move what lies in ``source`` into the home. Its own settings and key stay.

    Raises:
        StorageError: the home does not take them.
    """
    for path in source.iterdir():
        target = root / path.name
        if path.name in SINGLE and target.exists():
            continue
        try:
            _move(path, target)
        except OSError as error:
            raise StorageError(
                f"the rows are restored, but {target} is not ({error}): repair that place, then"
                " restore into a new BABYLON_HOME and another empty database"
            ) from error


def _move(path: Path, target: Path) -> None:
    """Move a file or directory into its place, which an empty directory may have."""
    if path.name == "cache":  # the notes of the object store's copies; there may be others
        shutil.copytree(path, target, dirs_exist_ok=True)
        return
    try:
        os.rename(path, target)
    except OSError:
        if not target.is_dir():
            raise
        for child in path.iterdir():  # a mount point, or a link to a directory
            shutil.move(child, target / child.name)


async def _check_database(address: Address, manifest: Manifest) -> None:
    where = address.place
    async with first_session(address) as (session, _):
        revision = await current_revision(session)
        if revision not in (None, manifest.revision):
            raise DatabaseError(
                f"the database {where} is at version {revision}, the backup at"
                f" {manifest.revision}: restore into a database without schema babylon"
            )
        if found := await filled(session, manifest.tables):
            raise DatabaseError(
                f"the database {where} is not empty, {found} has rows: restore into another one"
            )
        if revision is None:
            others = await session.fetchval(_OTHERS)
            ours = others is None
        else:
            ours, others = await session.fetchval("SELECT ours FROM babylon.database"), "tables"
    if manifest.ours and not ours:
        raise DatabaseError(
            f"the backup has the game's tables too, and the database {where} is not empty, it"
            f" has {others}: restore into an empty one"
        )
    if not manifest.ours and ours:
        raise DatabaseError(
            f"the backup has schema babylon only, and the database {where} has no game tables"
            f" ({', '.join(GAME_TABLES)}): restore the game's database first"
        )


async def _fill(address: Address, directory: Path, manifest: Manifest) -> None:
    async with first_session(address) as (session, _):
        async with session.transaction():
            await session.execute("SET LOCAL datestyle = 'ISO'; SET LOCAL statement_timeout = 0")
            await read_tables(session, directory, manifest.tables)
        await session.execute_alone("ANALYZE")


# A table of another schema, of no extension.
_OTHERS = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname NOT IN ('babylon', 'information_schema')
  AND n.nspname !~ '^pg_'
  AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e')
LIMIT 1
"""

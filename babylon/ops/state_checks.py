"""``babylon doctor``: is the state complete, that is, database, champion and artifacts?

The champion is loaded, and the newest file of each kind is read: a home that lost a directory looks
well until a window needs it.
"""

import asyncio
import sys
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from hashlib import file_digest
from pathlib import Path

import pyarrow.parquet as pq
from pyarrow import ArrowException

from babylon.core.artifacts import DIGEST_CHARS
from babylon.core.errors import ArtifactError, BabylonError, ModelError
from babylon.core.home import Home
from babylon.core.objects import exists
from babylon.ops.finding import Finding
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.policies.shared_files import fetch_checkpoint
from babylon.store import Store
from babylon.store.play_in_use import window_uses
from babylon.store.policies import Policy, champion
from babylon.store.session import is_pooled

# A process of its own, because torch takes seconds to import and a model may need all memory. The
# GPU may be an engine's.
_LOAD = """
import sys
from babylon.core.errors import BabylonError
from babylon.policies.load import load_policy
try:
    load_policy(sys.argv[1], precision="bf16", device="cpu")
except BabylonError as error:
    sys.exit(str(error))
"""


async def check_state(
    opening: AbstractAsyncContextManager[Store], *, embedded: bool
) -> list[Finding]:
    """Check the database and all that it refers to."""
    try:
        async with opening as store:
            return [
                await _database(store, embedded=embedded),
                await _named("champion", _champion(store)),
                await _named("artifacts", _artifacts(store)),
            ]
    except BabylonError as error:
        return [Finding(name="database", ok=False, required=True, detail=str(error))]


async def _named(name: str, check: Awaitable[Finding]) -> Finding:
    """Return what a check found. A file that the object store does not give is its own problem."""
    try:
        return await check
    except (ArtifactError, ModelError) as error:
        return Finding(name=name, ok=False, required=True, detail=str(error))


async def _database(store: Store, *, embedded: bool) -> Finding:
    row = await store.pool.fetchrow(
        "SELECT current_setting('server_version') AS version,"
        " pg_database_size(current_database()) AS size,"
        " (SELECT sum(pg_total_relation_size(relid))::bigint"
        "  FROM pg_partition_tree('babylon.calls')) AS calls"
    )
    assert row is not None
    async with store.pool.acquire() as connection:
        pooled = await is_pooled(connection)
    kind = "embedded" if embedded else "DATABASE_URL"
    pooler = ", behind a pooler" if pooled else ""
    detail = (
        f"{kind}, Postgres {row['version']}{pooler}, {store.game_problem or 'game tables there'},"
        f" {_mb(row['size'])} ({_mb(row['calls'])} of calls)"
    )
    return Finding(name="database", ok=not store.game_problem, required=True, detail=detail)


async def _champion(store: Store) -> Finding:
    try:
        policy, _ = await champion(store)
    except ModelError:
        detail = "none yet, made by the first `babylon up` or `babylon train`"
        return Finding(name="champion", ok=None, required=True, detail=detail)
    named = f"policy {policy.policy_version} at {policy.uri}"
    if not Path(policy.uri).is_absolute():
        detail = f"{named}, not checked here: loaded from the hub when first used"
        return Finding(name="champion", ok=None, required=True, detail=detail)
    await asyncio.to_thread(fetch_checkpoint, store.home, policy.uri)
    problem = await asyncio.to_thread(_changed, policy) or await _load_problem(policy.uri)
    remedy = ": restore it from a backup, or `babylon deploy rollback`"
    detail = f"{named} loads" if problem is None else f"{named}: {problem}{remedy}"
    return Finding(name="champion", ok=problem is None, required=True, detail=detail)


def _changed(policy: Policy) -> str | None:
    found = checkpoint_digest(policy.uri)
    if found is None:
        return "there is no such directory"
    if policy.digest not in (None, found):
        return f"its files have digest {found[:12]}…, not {(policy.digest or '')[:12]}…"
    return None


async def _load_problem(uri: str) -> str | None:
    child = await asyncio.create_subprocess_exec(
        # -P: a file in the working directory must not take the place of a module.
        *(sys.executable, "-P", "-c", _LOAD, uri),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await child.communicate()
    if child.returncode == 0:
        return None
    return said.decode().strip().splitlines()[-1] if said.strip() else "the loading process died"


async def _artifacts(store: Store) -> Finding:
    named = [uri for one in await window_uses(store) for uri in one.artifacts]
    missing, damaged, read = await asyncio.to_thread(_examined, store.home, named)
    if missing or damaged:
        said = [f"{len(missing)} missing, the first is {missing[0]}"] if missing else []
        said += [f"{path} is damaged" for path in damaged]
        detail = f"{'; '.join(said)}: restore from a backup; else its window is scored again"
        return Finding(name="artifacts", ok=False, required=True, detail=detail)
    detail = f"{len(named)} that windows name are there; {', '.join(read) or 'no kind'} read"
    return Finding(name="artifacts", ok=True, required=True, detail=detail)


def _examined(home: Home, named: list[str]) -> tuple[list[str], list[Path], list[str]]:
    """Return the missing files, the damaged newest files, and the kinds that were read."""
    missing = [uri for uri in named if not exists(home, Path(home.resolve(uri)))]
    newest: dict[str, Path] = {}
    for path in (*home.artifacts.glob("*.parquet"), *home.datasets.rglob("*.parquet")):
        kind = path.stem[len("YYYY-MM-DDThh-mm-") : -DIGEST_CHARS - 1]
        if path.is_relative_to(home.datasets):
            kind = f"dataset {path.relative_to(home.datasets).parts[0]}"
        if kind not in newest or path.stat().st_mtime > newest[kind].stat().st_mtime:
            newest[kind] = path
    damaged = [path for path in newest.values() if not _is_sound(path)]
    return missing, damaged, sorted(newest)


def _is_sound(path: Path) -> bool:
    """Compare a file with the digest in its name, and read its rows."""
    try:
        with path.open("rb") as file:
            if not file_digest(file, "sha256").hexdigest().startswith(path.stem[-DIGEST_CHARS:]):
                return False
        for _ in pq.ParquetFile(path).iter_batches():
            pass
    except (OSError, ArrowException):
        return False
    return True


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"

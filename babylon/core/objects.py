"""Files of a home in an object store, for the other machines: ``ARTIFACT_STORE``.

The keys are the paths below the home, so a reference such as ``home:checkpoints/…`` means the same
on every machine, and a home or a bucket can move. Without a store, the home is the only place, and
nothing here does anything.

A single file is one object, and its name carries its digest. A directory is one object a file,
named by content (``checkpoints/X/<sha256>``), and ``checkpoints/X/manifest.json``, which is written
last and names them. Objects with content in their names are written once. A reader sees all of a
directory or nothing, and checks every digest, so it never uses what broke on the way. The home
holds copies up to ``ARTIFACT_CACHE_GB``; the least recently used go first.

All functions block.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError
from obstore.store import ObjectStore, from_url

from babylon.core.errors import ArtifactError, StorageError
from babylon.core.home import Home, make_directory

log = logging.getLogger(__name__)
T = TypeVar("T")
MANIFEST = "manifest.json"
WHOLE = 8 * 2**20  # bytes of a file that is sent in one request; larger ones go in parts
PART = 4 * 2**20  # bytes that are read in one request, which has ``REQUEST_S``
PARALLEL = 6
REQUEST_S, CONNECT_S, RETRY_S = 60.0, 5.0, 60.0
TRIES, PAUSE_S = 4, 0.2  # of a read whose bytes are wrong or break off
_CONTENT = re.compile("[0-9a-f]{64}")  # name of a directory's file
BROKEN_OFF_S = 3600.0
KEEP_S = 600.0  # a copy that was used this lately may be read at this moment


class _File(msgspec.Struct, frozen=True):
    path: str
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    files: list[_File]


def publish(home: Home, path: Path) -> None:
    """Copy a file or directory of the home into the store. What is there already is not sent again.

    Raises:
        StorageError: The store does not take it, after all retries.
    """
    if not home.store:
        return
    key, store = _key(home, path), _store(home.store)
    try:
        if path.is_dir():
            files = [(file, _described(path, file)) for file in _files(path)]
            for file, about in files:
                _put(store, f"{key}/{about.sha256}", file)
            text = msgspec.json.encode(_Manifest([about for _, about in files]))
            obstore.put(store, f"{key}/{MANIFEST}", text)
            _remember(home, key, hashlib.sha256(text).hexdigest())
        else:
            _put(store, key, path)
            _remember(home, key, "")
    except BaseError as error:
        raise StorageError(
            f"{home.store} does not take {key} ({_short(error)}){_REMEDY}"
        ) from error


def replace(home: Home, path: Path) -> None:
    """Copy a small file into the store, in the place of an earlier one of that name.

    Raises:
        StorageError: The store does not take it.
    """
    if home.store:
        try:
            obstore.put(_store(home.store), _key(home, path), path.read_bytes())
        except BaseError as error:
            raise StorageError(
                f"{home.store} does not take {path.name} ({_short(error)})"
            ) from error


def read(home: Home, path: Path) -> bytes:
    """Return the bytes of a small file, from the store if there is one.

    Raises:
        FileNotFoundError: It does not exist.
        ArtifactError: The store does not answer.
    """
    if not home.store:
        return path.read_bytes()
    key = _key(home, path)
    try:
        return _retried(lambda: bytes(obstore.get(_store(home.store), key).bytes()))
    except BaseError as error:
        raise ArtifactError(f"{key} cannot be read from {home.store} ({_short(error)})") from error


def fetch(home: Home, path: Path, sha256: str | None = None) -> Path:
    """Bring a file or directory of the home here from the store, unless it is here already.

    ``sha256``: digest of a single file. A directory's own manifest has the digests of its files;
    a copy of an older state is replaced. While the store does not answer, the copy here is used.

    Raises:
        ArtifactError: It is neither here nor in the store, or what the store sends has another
            digest, or breaks off, in every try.
    """
    if not home.store or not path.is_relative_to(home.root):
        return path
    key, store = _key(home, path), _store(home.store)
    # A file with its digest in its name never changes; what is in a directory may.
    if sha256 is not None and _is_here(home, key, "", path.is_file):
        return path
    try:
        if sha256 is not None:
            size = int(obstore.head(store, key)["size"])
            _receive(store, key, _File(path.name, size, sha256), path)
            _remember(home, key, "")
        else:
            _fetch_directory(home, store, key, path)
    except FileNotFoundError as error:
        if not path.exists():
            raise ArtifactError(
                f"{key} is neither in {home.root} nor in {home.store}: it was removed, or the"
                " machine that made it has another ARTIFACT_STORE"
            ) from error
    except BaseError as error:
        if not path.exists():
            raise ArtifactError(
                f"{key} cannot be read from {home.store} ({_short(error)}){_REMEDY}"
            ) from error
        log.warning("%s does not answer, the copy of %s here is used", home.store, key)
        return path  # nothing leaves the cache while nothing could bring it back
    trim(home)
    return path


def check(home: Home) -> None:
    """Write, read and delete a small object.

    Raises:
        StorageError: The store does not take it.
    """
    key = f"check-{uuid.uuid4().hex}"
    try:
        store = _store(home.store)
        obstore.put(store, key, b"babylon", mode="create")
        found = bytes(obstore.get(store, key).bytes())
        obstore.delete(store, key)
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise StorageError(f"{home.store} cannot be used ({_short(error)}){_REMEDY}") from error
    if found != b"babylon":
        raise StorageError(f"{home.store} returns other bytes than were written{_REMEDY}")


def names(home: Home, directory: Path) -> list[Path]:
    """Return the paths of the files and directories right below one of the home, here or stored.

    Raises:
        StorageError: The store does not answer.
    """
    found = set(directory.iterdir()) if directory.is_dir() else set[Path]()
    if home.store:
        key = _key(home, directory)
        with _answering(home, key):
            listed = obstore.list_with_delimiter(_store(home.store), key)
        found |= {home.root / prefix for prefix in listed["common_prefixes"]}
        found |= {home.root / one["path"] for one in listed["objects"]}
    return sorted(found)


def exists(home: Home, path: Path) -> bool:
    """Return True if a single file is here or in the store.

    Raises:
        StorageError: The store does not answer.
    """
    if path.is_file() or not home.store:
        return path.is_file()
    key = _key(home, path)
    try:
        with _answering(home, key):
            obstore.head(_store(home.store), key)
    except FileNotFoundError:
        return False
    return True


def copy_stored(home: Home, directory: Path, target: Path) -> None:
    """Copy a directory of the home from the store, apart from files that ``target`` has already.

    Raises:
        ArtifactError: The store does not answer, or sends other bytes than were written.
    """
    if not home.store:
        return
    store, within = _store(home.store), _key(home, directory)
    try:
        keys = [one["path"] for chunk in obstore.list(store, within) for one in chunk]
        whole = {key.rpartition("/")[0] for key in keys if key.endswith(f"/{MANIFEST}")}
        for key in keys:
            parent, _, name = key.rpartition("/")
            if name == MANIFEST:
                text = read(home, home.root / key)
                for file in msgspec.json.decode(text, type=_Manifest).files:
                    path = _inside(target / parent, file.path)
                    if not path.exists():
                        _receive(store, f"{parent}/{file.sha256}", file, path)
                continue
            path, part = target / key, parent in whole or _CONTENT.fullmatch(name)
            if not part and not path.exists():
                make_directory(path.parent)
                path.write_bytes(read(home, home.root / key))
    except BaseError as error:
        raise ArtifactError(
            f"{within} cannot be read from {home.store} ({_short(error)}){_REMEDY}"
        ) from error


def changed_at(home: Home, path: Path) -> float:
    """Return the time of a file's last change, in seconds since 1970.

    Raises:
        FileNotFoundError: It is neither here nor in the store.
        StorageError: The store does not answer.
    """
    if path.exists() or not home.store:
        return path.stat().st_mtime
    key = _key(home, path)
    try:
        with _answering(home, key):
            return obstore.head(_store(home.store), key)["last_modified"].timestamp()
    except FileNotFoundError as error:
        raise FileNotFoundError(path) from error


def remove(home: Home, path: Path) -> None:
    """Delete a file or directory, here and in the store. The manifest goes first.

    Raises:
        OSError: It cannot be deleted here.
        StorageError: It cannot be deleted in the store.
    """
    if home.store:
        key, store = _key(home, path), _store(home.store)
        try:
            # A directory store refuses a path through a file, and a directory as an object.
            stored = [one["path"] for chunk in obstore.list(store, key) for one in chunk] or [key]
            for one in sorted(stored, key=lambda name: name != f"{key}/{MANIFEST}"):
                with suppress(FileNotFoundError):  # another machine was faster
                    obstore.delete(store, one)
        except BaseError as error:
            raise StorageError(f"{key} stays in {home.store} ({_short(error)})") from error
        _index(home, key).unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def trim(home: Home) -> None:
    """Delete copies of what is in the store until the others fit into ``ARTIFACT_CACHE_GB``.

    A copy that was used within ``KEEP_S`` stays, because a reader may have opened a part of it.
    """
    _remove_broken_off(home)
    bound, copies = home.cache_gb * 1e9, []
    for index in _index(home, "").parent.glob("*"):
        with suppress(FileNotFoundError):
            path = home.root / unquote(index.name)
            size = sum(file.stat().st_size for file in _files(path)) if path.is_dir() else 0
            size = size or path.stat().st_size
            copies.append((index.stat().st_mtime, size, path, index))
    total = sum(size for _, size, _, _ in copies)
    for used, size, path, index in sorted(copies):
        if total <= bound or used > time.time() - KEEP_S:
            return
        gone = path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
        with _uses(home), suppress(FileNotFoundError):
            if index.stat().st_mtime != used:  # another process began to read it meanwhile
                continue
            index.unlink()
            os.rename(path, gone)
        if gone.is_dir():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink(missing_ok=True)
        total -= size
        log.info("%s left the cache: it is in %s", path, home.store)


def _remove_broken_off(home: Home) -> None:
    """Delete what killed processes began to fetch. What is being fetched is written to."""
    places = (home.checkpoints, home.progress, home.models, home.artifacts)
    for path in [found for place in places for found in place.glob(".*.tmp")]:
        with suppress(OSError):  # another process was faster
            newest = max(file.stat().st_mtime for file in (path, *path.rglob("*")))
            if newest < time.time() - BROKEN_OFF_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


_REMEDY = ": see that it answers, and AWS_ENDPOINT_URL and its credentials"


@contextmanager
def _answering(home: Home, key: str) -> Iterator[None]:
    try:
        yield
    except BaseError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise StorageError(
            f"{home.store} does not answer for {key} ({_short(error)}){_REMEDY}"
        ) from error


@lru_cache
def _store(uri: str) -> ObjectStore:
    """Open a store. The library reads credentials where the provider's own tools do: ``AWS_*``."""
    if uri.startswith("file://"):
        make_directory(Path(uri.removeprefix("file://")))
        return from_url(uri, automatic_cleanup=True)  # an object store has no empty directories
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    return from_url(
        uri,
        client_options={
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "allow_http": endpoint.startswith("http://"),
        },
        retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=RETRY_S)},
    )


def _put(store: ObjectStore, key: str, path: Path) -> None:
    """Write an object once. Its name names its content, so one that is there is this one."""
    size = path.stat().st_size
    if size <= WHOLE:
        with suppress(AlreadyExistsError):
            obstore.put(store, key, path.read_bytes(), mode="create")
        return
    with suppress(FileNotFoundError):
        if obstore.head(store, key)["size"] == size:
            return
    # The store shows the object when its last part has arrived. A second writer sends the same.
    obstore.put(store, key, path, chunk_size=WHOLE, max_concurrency=PARALLEL)


def _fetch_directory(home: Home, store: ObjectStore, key: str, path: Path) -> None:
    for last in range(TRIES, 0, -1):
        text = _retried(lambda: bytes(obstore.get(store, f"{key}/{MANIFEST}").bytes()))
        digest = hashlib.sha256(text).hexdigest()
        if _is_here(home, key, digest, partial(_has_state, path, _index(home, key), digest)):
            return
        make_directory(path.parent)
        temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
        try:
            for file in msgspec.json.decode(text, type=_Manifest).files:
                _receive(store, f"{key}/{file.sha256}", file, _inside(temporary, file.path))
            _replace(path, temporary)
        except FileNotFoundError:  # replaced meanwhile: read the new manifest
            if last == 1:
                raise
            continue
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _remember(home, key, digest)
        return


def _replace(path: Path, temporary: Path) -> None:
    old = path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
    with suppress(FileNotFoundError):
        os.rename(path, old)
    with suppress(OSError):  # another process brought the same here
        os.rename(temporary, path)
    shutil.rmtree(old, ignore_errors=True)


def _receive(store: ObjectStore, key: str, about: _File, path: Path) -> None:
    """Read one object into a file, which appears whole and with its digest or not at all."""
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
    problem = ""
    try:
        for attempt in range(TRIES):
            time.sleep(attempt * PAUSE_S)
            found, digest = 0, hashlib.sha256()
            with temporary.open("wb") as file:
                for part in _parts(store, key, about.bytes):
                    file.write(part)
                    digest.update(part)
                    found += len(part)
                file.flush()
                os.fsync(file.fileno())
            if found == about.bytes and digest.hexdigest() == about.sha256:
                os.replace(temporary, path)
                return
            problem = f"{found} bytes with sha256 {digest.hexdigest()[:16]}…"
        raise ArtifactError(
            f"{key} arrives as {problem}, expected {about.bytes} bytes with {about.sha256[:16]}…,"
            f" {TRIES} times: it is damaged in the store; run its window again"
        )
    finally:
        temporary.unlink(missing_ok=True)


def _parts(store: ObjectStore, key: str, size: int) -> Iterator[bytes]:
    """Yield an object's bytes in order, ``PARALLEL`` requests ahead."""

    def part(start: int) -> bytes:
        end = min(start + PART, size)
        return _retried(lambda: bytes(obstore.get_range(store, key, start=start, end=end)))

    starts = range(0, size, PART)
    if len(starts) <= 1:
        yield from map(part, starts)
        return
    with ThreadPoolExecutor(PARALLEL) as threads:
        for first in range(0, len(starts), PARALLEL):
            yield from threads.map(part, starts[first : first + PARALLEL])


def _retried(read: Callable[[], T]) -> T:
    """Read again what broke off after the store had begun to answer, which the library reports."""
    for attempt in range(TRIES - 1):
        try:
            return read()
        except (FileNotFoundError, InvalidPathError):
            raise
        except BaseError as error:
            log.info("a read from the object store is repeated: %s", _short(error))
            time.sleep((attempt + 1) * PAUSE_S)
    return read()


def _key(home: Home, path: Path) -> str:
    return path.relative_to(home.root).as_posix()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _described(directory: Path, file: Path) -> _File:
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    return _File(file.relative_to(directory).as_posix(), file.stat().st_size, sha256)


def _inside(directory: Path, name: str) -> Path:
    """Return a file's path below the directory. A manifest must not name any other place."""
    path = Path(os.path.normpath(directory / name))
    if not path.is_relative_to(directory) or path == directory:
        raise ArtifactError(f"a manifest names the file {name!r}: it was not written by babylon")
    return path


def _index(home: Home, key: str) -> Path:
    """Return the file that notes a copy: its content is the manifest's digest, its time the use."""
    return home.root / "cache" / "objects" / (quote(key, safe="") or "_")


def _remember(home: Home, key: str, digest: str) -> None:
    index = _index(home, key)
    make_directory(index.parent)
    part = index.with_name(f"{index.name}.{uuid.uuid4().hex}")
    part.write_text(digest)
    part.replace(index)


def _is_here(home: Home, key: str, digest: str, present: Callable[[], bool]) -> bool:
    """Return True if a copy is here. It then counts as used, before ``trim`` can delete it."""
    with _uses(home), suppress(FileNotFoundError):
        if present():
            _remember(home, key, digest)
            return True
    return False


def _has_state(path: Path, index: Path, digest: str) -> bool:
    return path.is_dir() and index.read_text() == digest


@contextmanager
def _uses(home: Home) -> Iterator[None]:
    """Hold the lock on the times of use, for all processes of this machine."""
    path = home.root / "cache" / "objects.lock"
    make_directory(path.parent)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _short(error: BaseException) -> str:
    """Return the first line of the library's error, which never holds credentials."""
    return " ".join(str(error).split())[:200] or type(error).__name__

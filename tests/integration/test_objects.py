"""Artifacts and checkpoints in an object store: a real S3 API that also fails."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import polars as pl
import pytest

from babylon.core import objects
from babylon.core.artifacts import read_artifact, write_artifact
from babylon.core.errors import ArtifactError, StorageError
from babylon.core.home import Home
from babylon.core.objects import exists, fetch, names, publish, remove, trim
from tests.object_server import BUCKET, ENVIRONMENT, Faults, faulty_proxy, object_server

FRAME = pl.DataFrame({"trajectory_id": ["a", "b"], "score": [0.5, 1.0]})
WINDOW = "2025-11-14T09:00"
LARGE = objects.WHOLE + 3 * objects.PART + 17


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with object_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def store(
    s3: str, faults: Faults, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URI of a prefix of this test's own, behind the proxy."""
    with faulty_proxy(s3, faults) as url:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        objects._store.cache_clear()
        yield f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}"
        objects._store.cache_clear()


@pytest.fixture
def homes(store: str, tmp_path: Path) -> tuple[Home, Home]:
    """Two machines: other paths, nothing in common but the store."""
    return Home(tmp_path / "here", store), Home(tmp_path / "there" / "of another user", store)


def _checkpoint(home: Home, name: str = "2025-11-14T0900-e1", weights: bytes = b"w") -> Path:
    path = home.checkpoints / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter.safetensors").write_bytes(weights)
    (path / "config.json").write_text(json.dumps({"base": "../../models/x"}))
    return path


def _content(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()
    }


def test_an_artifact_and_a_checkpoint_are_read_on_a_machine_with_another_home(
    homes: tuple[Home, Home],
) -> None:
    here, there = homes
    artifact = write_artifact(here, FRAME, window_id=WINDOW, stage="scored")
    assert artifact.uri.startswith("home:artifacts/")
    assert read_artifact(there, artifact).equals(FRAME)
    made = _checkpoint(here, weights=os.urandom(LARGE))
    publish(here, made)
    other = fetch(there, there.checkpoints / made.name)
    assert _content(other) == _content(made)
    assert names(there, there.checkpoints) == [other] and exists(
        there, there.root / artifact.uri[5:]
    )


def test_what_is_there_is_not_sent_again_and_a_second_writer_changes_nothing(
    homes: tuple[Home, Home], faults: Faults
) -> None:
    here, there = homes
    made = _checkpoint(here, weights=os.urandom(LARGE))
    publish(here, made)
    sent = faults.seen["POST"]  # of the parts of a large file
    assert sent
    publish(here, made)
    publish(there, _checkpoint(there, weights=(made / "adapter.safetensors").read_bytes()))
    assert faults.seen["POST"] == sent
    artifact = write_artifact(here, FRAME, window_id=WINDOW)
    assert write_artifact(there, FRAME, window_id=WINDOW) == artifact


@pytest.mark.parametrize("kind", ["refused", "torn", "flipped", "slow"])
def test_reads_and_writes_survive_a_store_that_fails(
    homes: tuple[Home, Home], faults: Faults, kind: str
) -> None:
    here, there = homes
    made = _checkpoint(here, weights=os.urandom(LARGE))
    if kind in ("refused", "slow"):
        faults.left[kind] = 4
    publish(here, made)
    # A manifest holds no digest of its own: the first byte of what it names is what breaks.
    faults.about = lambda request: objects.MANIFEST not in request.path
    faults.left[kind] = 3
    other = fetch(there, there.checkpoints / made.name)
    assert _content(other) == _content(made)
    assert faults.seen[kind] >= 3
    assert not [*there.root.rglob("*.tmp")]


def test_bytes_that_stay_wrong_are_an_error_and_leave_nothing(
    homes: tuple[Home, Home], store: str
) -> None:
    here, there = homes
    artifact = write_artifact(here, FRAME, window_id=WINDOW)
    obstore.put(objects._store(store), artifact.uri.removeprefix("home:"), b"something else")
    with pytest.raises(ArtifactError, match=r"14 bytes with sha256 .* damaged in the store"):
        read_artifact(there, artifact)
    assert not [*there.artifacts.iterdir()]


def test_a_store_that_is_down_is_an_error_that_names_it_and_copies_are_used_meanwhile(
    homes: tuple[Home, Home], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "RETRY_S", 0.2)
    here, there = homes
    made = _checkpoint(here)
    publish(here, made)
    fetch(there, there.checkpoints / made.name)
    other = _checkpoint(here, "2025-11-14T1000-e1")
    objects._store.cache_clear()
    faults.left["refused"] = 1000
    with pytest.raises(StorageError, match=r"s3://.* does not take checkpoints/2025-11-14T1000-e1"):
        publish(here, other)
    full = Home(there.root, there.store, cache_gb=0.0)
    old = objects._index(there, f"checkpoints/{made.name}")
    # The cache would drop it, and nothing could bring it back.
    os.utime(old, (time.time() - 7200,) * 2)
    assert fetch(full, there.checkpoints / made.name).is_dir()
    with pytest.raises(ArtifactError, match=r"2025-11-14T1000-e1 cannot be read"):
        fetch(there, there.checkpoints / other.name)
    for ask in (objects.names, objects.exists, objects.changed_at):
        with pytest.raises(StorageError, match=r"does not answer for checkpoints/none.*AWS_ENDP"):
            ask(there, there.checkpoints / "none")


def test_what_a_second_attempt_wrote_replaces_the_copy_of_the_first(
    homes: tuple[Home, Home],
) -> None:
    here, there = homes
    publish(here, _checkpoint(here, weights=b"first"))
    path = fetch(there, there.checkpoints / "2025-11-14T0900-e1")
    publish(here, _checkpoint(here, weights=b"second"))
    assert fetch(there, path) == path
    assert (path / "adapter.safetensors").read_bytes() == b"second"


def test_the_copies_used_least_lately_go_and_what_is_only_here_stays(
    homes: tuple[Home, Home], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = homes
    made = [_checkpoint(here, f"2025-11-14T{hour:02}00-e1", os.urandom(1000)) for hour in range(3)]
    for path in made:
        publish(here, path)
        fetch(there, there.checkpoints / path.name)
    alone = _checkpoint(there, "2025-11-14T0700-e1")
    for hour, path in enumerate(made):
        index = objects._index(there, f"checkpoints/{path.name}")
        os.utime(index, (time.time() - 7200 + hour,) * 2)
    fetch(there, there.checkpoints / made[0].name)  # used now, so it stays
    trim(Home(there.root, there.store, cache_gb=1.5e-6))
    left = {path.name for path in there.checkpoints.iterdir()}
    assert left == {made[0].name, alone.name}
    assert _content(fetch(there, there.checkpoints / made[1].name)) == _content(made[1])


def test_what_killed_processes_began_to_fetch_goes_after_an_hour(homes: tuple[Home, Home]) -> None:
    here, there = homes
    made = _checkpoint(here)
    publish(here, made)
    broken, young = (there.checkpoints / f".{name}-0123.tmp" for name in ("broken", "young"))
    for path in (broken, young):
        path.mkdir(parents=True)
        (path / "weights.part").write_bytes(b"half")
    for path in (broken, broken / "weights.part", young):
        os.utime(path, (time.time() - 2 * objects.BROKEN_OFF_S,) * 2)
    fetch(there, there.checkpoints / made.name)
    assert {path.name for path in there.checkpoints.iterdir()} == {made.name, young.name}


def test_what_is_removed_is_gone_in_the_store_too(homes: tuple[Home, Home]) -> None:
    here, there = homes
    made = _checkpoint(here)
    publish(here, made)
    artifact = write_artifact(here, FRAME, window_id=WINDOW)
    remove(there, there.checkpoints / made.name)
    remove(there, there.root / artifact.uri.removeprefix("home:"))
    assert names(there, there.checkpoints) == names(there, there.artifacts) == []
    with pytest.raises(ArtifactError, match="neither in"):
        fetch(there, there.checkpoints / made.name)


def test_a_copy_that_is_used_while_others_are_trimmed_stays(
    homes: tuple[Home, Home], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = homes
    made = [_checkpoint(here, f"2025-11-14T{hour:02}00-e1", os.urandom(1000)) for hour in range(2)]
    for path in made:
        publish(here, path)
        os.utime(objects._index(here, f"checkpoints/{path.name}"), (time.time() - 7200,) * 2)
    real, listed = objects._files, list[Path]()

    def used_meanwhile(directory: Path) -> list[Path]:
        listed.append(directory)
        if len(listed) == 2:  # the first one is known to be old
            fetch(here, listed[0])
        return real(directory)

    monkeypatch.setattr(objects, "_files", used_meanwhile)
    trim(Home(here.root, here.store, cache_gb=0.0))
    assert [*here.checkpoints.iterdir()] == [listed[0]]


def test_a_directory_store_needs_no_server(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/shared"
    here, there = Home(tmp_path / "here", uri), Home(tmp_path / "there", uri)
    publish(here, _checkpoint(here))
    assert _content(fetch(there, there.checkpoints / "2025-11-14T0900-e1"))
    artifact = write_artifact(here, FRAME, window_id=WINDOW)
    assert read_artifact(there, artifact).equals(FRAME)
    remove(there, there.checkpoints / "2025-11-14T0900-e1")
    remove(there, there.root / artifact.uri.removeprefix("home:"))
    assert names(there, there.checkpoints) == names(there, there.artifacts) == []
    remove(here, here.checkpoints / "2025-11-14T0900-e1")  # two machines retire the same
    assert [path for path in (tmp_path / "shared").rglob("*") if path.is_file()] == []

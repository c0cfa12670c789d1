import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from babylon.policies.durable import save_tensors, written


def test_a_full_disk_is_told_by_its_name_and_no_part_stays(tmp_path: Path) -> None:
    path = tmp_path / "progress.pt"
    path.symlink_to("/dev/full")  # every write to it ends with "no space left on device"
    with pytest.raises(OSError) as failure, written(path):
        save_tensors({"weights": torch.zeros(1_000_000)}, path)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, str(path))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_under_safetensors_is_told_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(OSError) as failure, written(path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    assert failure.value.errno == errno.ENOSPC and not path.exists()


def test_another_failure_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"), written(tmp_path / "x"):
        raise RuntimeError("a bug")

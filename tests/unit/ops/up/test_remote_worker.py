"""Workers of a machine of its own, and the GPUs that each of them gets."""

import pytest

from babylon.core.settings_loading import load_settings
from babylon.ops.up.remote_worker import RemoteWorker

FIRST, SECOND = "GPU-8f3a1b2c-4d5e", "GPU-9a4b2c3d-5e6f"


def test_gpus_that_are_named_by_their_uuid_are_handed_on_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{FIRST},{SECOND}")
    settings = load_settings(training={"processes": 1})
    given = [variables for _, variables in RemoteWorker(settings, "gpu")._workers()]
    assert given == [{"CUDA_VISIBLE_DEVICES": FIRST}, {"CUDA_VISIBLE_DEVICES": SECOND}]


def test_gpus_that_are_too_few_for_an_update_get_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    settings = load_settings(training={"processes": 2})
    given = [variables for _, variables in RemoteWorker(settings, "gpu")._workers()]
    assert given == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]

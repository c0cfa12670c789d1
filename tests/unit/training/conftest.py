from pathlib import Path

import pytest

from tests.tiny_policy import save_tiny_policy


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("parent"), seed=0)

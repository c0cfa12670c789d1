"""Marks the slow files: ``make test-fast`` leaves them out."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW = {
    "evaluation/arena/test_match.py",
    "evaluation/experiment/test_peeking.py",
    "game/market/test_scripted.py",
    "ops/test_doctor.py",
    "policies/test_load.py",
    "serving/engine/test_running_batch.py",
    "stages/test_tracking.py",
    "training/grpo/test_bandit.py",
    "training/grpo/test_forward.py",
    "training/grpo/test_memory.py",
    "training/grpo/test_prefix_tree.py",
    "training/test_resume.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [file for file in SLOW if not (HERE / file).is_file()]
    assert not missing, missing
    for item in items:
        if item.path.is_relative_to(HERE) and str(item.path.relative_to(HERE)) in SLOW:
            item.add_marker(pytest.mark.slow)

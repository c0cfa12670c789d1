"""The schema: a newer one breaks no reader of an older one."""

from pathlib import Path

import pyarrow as pa
import pytest

from babylon.dataset.schema import MESSAGE, SCHEMA_VERSION, SCHEMAS

FIRST = Path(__file__).parent / "schema_v1.txt"


def test_a_published_column_never_changes_or_disappears() -> None:
    """``schema_v1.txt`` is frozen: later versions only add columns."""
    now = {f"{name}.{field.name}: {field.type}" for name in SCHEMAS for field in SCHEMAS[name]}
    first = set(FIRST.read_text().splitlines())
    assert first <= now
    assert SCHEMA_VERSION > 1 or first == now, "a new column needs a new SCHEMA_VERSION"


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_column_has_a_meaning(name: str) -> None:
    assert all(len(field.metadata[b"about"]) > 10 for field in SCHEMAS[name])


def test_ground_truth_has_columns_of_its_own() -> None:
    names = {MESSAGE.field(i).name for i in range(MESSAGE.num_fields)}
    assert names == {"role", "content", "tool_calls", "tool_call_id", "reasoning", "raw_json"}
    assert pa.types.is_string(SCHEMAS["trajectories"].field("ground_truth_json").type)

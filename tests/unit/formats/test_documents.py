"""Files of JSON objects."""

from pathlib import Path

import pytest

from babylon.formats.format_names import Format
from babylon.formats.import_files import guess_format
from babylon.formats.trace import ImportFileError, read_documents
from tests.unit.formats.traces import write_lines


def places(path: Path) -> list[str]:
    return [one.place.removeprefix(str(path)) for one in read_documents(path)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}\n\n{"a": 2}\n', [":1", ":3"]),
        ('{"a": 1}', [":1"]),
        ('\n{\n "a": 1\n}\n', [":2"]),
        ('[{"a": 1},\n {"a": 2}]', [":1[0]", ":1[1]"]),
        ('[{"a": 1}]', [":1[0]"]),
        ("", []),
    ],
)
def test_lines_one_object_or_a_list(tmp_path: Path, text: str, expected: list[str]) -> None:
    file = tmp_path / "f"
    file.write_text(text)
    assert places(file) == expected


@pytest.mark.parametrize("text", ["{", '{"a": 1}\n[2]', '{"a": 1}\n{"a"', "[1]", "7"])
def test_what_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f"
    file.write_text(text)
    with pytest.raises(ImportFileError, match=rf"f:{1 + text.count(chr(10))}: not a JSON object"):
        places(file)


@pytest.mark.parametrize(
    ("first", "format"),
    [
        ({"schema_version": "ATIF-v1.7", "steps": []}, Format.ATIF),
        ({"messages": [{"role": "user", "content": "x"}]}, Format.CHAT),
        ({"resourceSpans": []}, None),
        ({"id": "1", "trajectoryId": "t"}, Format.GAME),
    ],
)
def test_formats_are_found(tmp_path: Path, first: dict[str, object], format: Format | None) -> None:
    assert guess_format(write_lines(tmp_path / "f.jsonl", first)) is format

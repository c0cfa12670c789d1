"""COPY's text format: https://www.postgresql.org/docs/current/sql-copy.html"""

from collections.abc import Callable, Sequence
from datetime import datetime
from types import NoneType
from typing import Any

import msgspec


def copy_text(value: str) -> str:
    """Return a text with its special characters escaped."""
    value = value.replace("\\", r"\\").replace(
        "\t", r"\t"
    )  # str.translate takes three times as long
    return value.replace("\n", r"\n").replace("\r", r"\r")


def copy_json(value: Any) -> str:
    """Return a value as JSON, for a column of JSON or text."""
    return copy_text(msgspec.json.encode(value).decode())


def copy_array(value: Sequence[Any]) -> str:
    """Return a list as an array: https://www.postgresql.org/docs/current/arrays.html"""
    return copy_text("{" + ",".join(map(_element, value)) + "}")


def copy_value(value: Any) -> str:
    """Return a decoded JSON value or a time, as its column's type reads it."""
    return _FORMATS[type(value)](value)


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'
    return str(value)


_FORMATS: dict[type, Callable[[Any], str]] = {
    str: copy_text,
    bool: lambda value: "true" if value else "false",
    int: repr,
    float: repr,
    NoneType: lambda _: r"\N",
    datetime: datetime.isoformat,
    dict: copy_json,
    list: copy_json,
    tuple: copy_json,
}

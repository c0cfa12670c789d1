"""A group of settings, and a field with its environment variable."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def env(default: Any, variable: str, **limits: Any) -> Any:
    """A field with its environment variable. The text below it is its line in docs/settings.md."""
    return Field(default, json_schema_extra={"variable": variable}, **limits)


class Group(BaseModel):
    """Settings that are read together."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

"""A finding of ``babylon doctor``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. ``ok`` is ``None`` for what was not checked.

    ``required``: the system does not work without it.
    """

    name: str
    ok: bool | None
    required: bool
    detail: str

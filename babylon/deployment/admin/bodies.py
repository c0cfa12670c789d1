"""Bodies of the admin API. A field that there is not is an error, never ignored."""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from babylon.serving.openai_wire import RequestError

Version = Annotated[int, Meta(ge=0, lt=2**31)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Reason = Annotated[str, Meta(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


class Rollback(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/rollback``. ``reason`` is kept in the route's history."""

    reason: Reason = "admin API"


class Replace(Rollback, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/replace``. ``force`` skips the checks, and the history says so."""

    policy_version: Version
    force: bool = False


class Ab(Replace, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/ab``. ``share`` of the agents for the challenger, half of them at first."""

    share: Share | None = None


class Canary(Rollback, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/canary``. Without a policy: the share of the canary that runs."""

    policy_version: Version | None = None
    share: Share | None = None
    force: bool = False


Body = TypeVar("Body", bound=Rollback)


def parse(body: bytes, kind: type[Body]) -> Body:
    """An empty body is an object without fields.

    Raises:
        RequestError: 400, it is something else; says what and where.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"bad {kind.__name__.lower()} request: {error}") from error

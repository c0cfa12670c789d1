"""What the command line asks of the flows: one JSON argument to ``python -m babylon.flows``."""

from typing import Any, Literal

import msgspec

Mode = Literal["single", "continuous", "backfill"]


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """``overrides`` are settings by name; ``hours`` is how far a backfill looks back, ``first`` and
    ``last`` its dates or window ids, ``limit`` the most windows that it trains."""

    mode: Mode = "single"
    window_id: str | None = None
    hours: int | None = None
    first: str | None = None
    last: str | None = None
    limit: int | None = None
    overrides: dict[str, Any] = {}
    json: bool = False


class DemoRequest(msgspec.Struct, frozen=True, kw_only=True, tag="demo"):
    """``windows`` simulated hours of play, each trained, validated and deployed."""

    windows: int
    overrides: dict[str, Any] = {}
    json: bool = False


Request = TrainRequest | DemoRequest


def encode(request: Request) -> str:
    return msgspec.json.encode(request).decode()


def decode(text: str) -> Request:
    return msgspec.json.decode(text, type=TrainRequest | DemoRequest)

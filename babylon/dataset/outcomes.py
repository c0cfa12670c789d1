"""The table ``outcomes``: what came true in a window, from its market outcomes."""

from collections.abc import Iterator
from typing import Any

import msgspec

from babylon.core.artifacts import iter_artifact
from babylon.core.home import Home
from babylon.core.types import Scored

_NAMES = {
    "ticker": "stockTicker",
    "start_price_usd": "startPrice",
    "end_price_usd": "endPrice",
    "change_percent": "changePercent",
    "market_id": "predictionMarketId",
    "question": "question",
    "outcome": "outcome",
    "final_probability": "finalProbability",
}


class _Outcomes(msgspec.Struct):
    market_outcomes: list[dict[str, object]] = []


def outcome_rows(home: Home, scored: Scored) -> Iterator[list[dict[str, Any]]]:
    """Yield the window's outcomes. All trajectories of a window carry the same ones."""
    for frame in iter_artifact(home, scored.artifact, ["knowledge_json"]):
        first = msgspec.json.decode(frame["knowledge_json"][0], type=_Outcomes)
        yield [
            {"window_id": scored.claim.window_id, **{to: row.get(of) for to, of in _NAMES.items()}}
            for row in first.market_outcomes
        ]
        return

"""The table ``outcomes``: what came true in a window, from its market outcomes."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from babylon.core.artifacts import iter_artifact
from babylon.core.home import Home
from babylon.core.types import Scored
from babylon.dataset.schema import OUTCOMES, SCHEMAS
from babylon.dataset.trajectories import number

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
            {
                "window_id": scored.claim.window_id,
                **{to: _value(to, row.get(of)) for to, of in _NAMES.items()},
            }
            for row in first.market_outcomes
        ]
        return


def _value(column: str, value: object) -> object:
    """Return the value in its column's type. Games write ids as integers and answers as booleans.

    What is no number is null in a column of numbers.
    """
    if not pa.types.is_string(SCHEMAS[OUTCOMES].field(column).type):
        return number(value)
    return None if value is None else str(value)
